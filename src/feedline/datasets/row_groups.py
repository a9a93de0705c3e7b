"""The row groups of Parquet files: what they hold, checked against each other, and each decoded by its number."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import extras
from feedline.datasets.arrow import refuse_different
from feedline.datasets.chunks import StructChunk, table_chunk
from feedline.datasets.kinds import Struct, kinds_of, pyarrow
from feedline.datasets.paths import Paths, Version, listed, matching, refuse_changed, unbraced, version
from feedline.errors import ArgumentError, SampleError

_WHAT = "datasets.Parquet"


class RowGroups:
    """The row groups of all files, in order. Holds no open file; pickles as a description."""

    def __init__(self, paths: Paths, columns: Sequence[str] | None, filesystem: Any) -> None:
        pyarrow(_WHAT)
        self._filesystem = filesystem
        self.paths = matching(paths, "**/*.parquet") if filesystem is None else _within(filesystem, paths)
        self._versions = [self._version(path) for path in self.paths]
        sizes: list[list[int]] = []
        kinds: list[Struct] = []
        schema = None
        for path in self.paths:
            with self._opened(path) as file:
                if not kinds or not file.schema_arrow.equals(schema):
                    schema, kind = file.schema_arrow, kinds_of(file.schema_arrow, columns, path)
                kinds.append(kind)
                sizes.append([file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)])
        refuse_different(kinds, self.paths)
        self.kind = kinds[0]
        self.sizes: NDArray[np.int64] = np.array([size for each in sizes for size in each], np.int64)
        self._first = np.cumsum([0, *map(len, sizes)])

    def decoded(self, group: int) -> StructChunk:
        """The columns of a row group."""
        return table_chunk(self.kind, self._batch(group, [name for name, _ in self.kind.fields]))

    def rows_where(self, group: int, filters: Sequence[Any]) -> NDArray[np.int32]:
        """The rows of a row group for which pyarrow's filters hold."""
        arrow, parquet = pyarrow(_WHAT), _parquet()
        names = sorted(set(_filtered(filters)))
        condition = parquet.filters_to_expression(filters)
        path = self.paths[self._place(group)[0]]
        with self._opened(path) as file:
            kinds_of(file.schema_arrow, names, path)  # raises for a column that is not there
        table = arrow.Table.from_batches([self._batch(group, names)])
        numbered = table.append_column("", arrow.array(np.arange(table.num_rows, dtype=np.int32)))
        found: NDArray[np.int32] = numbered.filter(condition).column("").to_numpy()
        return found

    def locate(self, group: int, row: int) -> str:
        """A row of a row group, as the file knows it."""
        file, number = self._place(group)
        return f"{self.paths[file]}, row {int(self.sizes[group - number : group].sum()) + row} (row group {number})"

    def _place(self, group: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first, group, side="right")) - 1
        return file, group - int(self._first[file])

    def _batch(self, group: int, names: Sequence[str]) -> Any:
        file_number, number = self._place(group)
        path = self.paths[file_number]
        refuse_changed(path, self._versions[file_number], self._version(path))
        with self._opened(path) as file, _naming(f"row group {number} of {path}"):
            # a worker process has one thread of torch's, and takes one here
            table = file.read_row_group(number, columns=list(names), use_threads=torch.get_num_threads() > 1)
            batches = table.combine_chunks().to_batches()
        if len(batches) != 1:
            raise SampleError(
                f"row group {number} of {path} holds more than 2 GiB in one column; write it again in smaller ones"
            )
        return batches[0]

    @contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        with _naming(path):
            file = _parquet().ParquetFile(
                path,
                memory_map=self._filesystem is None,
                filesystem=self._filesystem,
                page_checksum_verification=True,
            )
        with file:
            yield file

    def _version(self, path: str) -> Version:
        if self._filesystem is None:
            return version(path)
        info = self._filesystem.get_file_info(path)
        return Version(info.size or 0, info.mtime_ns or 0)


def _parquet() -> Any:
    return extras.load("pyarrow.parquet", "arrow", _WHAT)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn what pyarrow raises on damaged data into errors that say where; a file that is not there stays that."""
    arrow = pyarrow(_WHAT)
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise SampleError(
            f"{what} cannot be read: it is damaged, cut short, or not Parquet ({error}); write it again or leave it out"
        ) from error


def _within(filesystem: Any, paths: Paths) -> list[str]:
    """The paths of files on a filesystem of pyarrow's, braces written out."""
    found = [path for given in listed(paths) for path in unbraced(os.fspath(given))]
    infos = filesystem.get_file_info(found)
    for info in infos:
        if not info.is_file:
            raise FileNotFoundError(f"{info.path} is no file on {type(filesystem).__name__}; list files one by one")
    if not found:
        raise FileNotFoundError("no files: the list of paths is empty")
    return found


def _filtered(filters: Sequence[Any]) -> Iterator[str]:
    """The columns that pyarrow's filters look at."""
    for each in filters:
        if isinstance(each, Sequence) and len(each) == 3 and isinstance(each[0], str):
            yield each[0]
        elif isinstance(each, Sequence) and not isinstance(each, str):
            yield from _filtered(each)
        else:
            raise ArgumentError(f"filters are (column, operator, value), or lists of these; got {each!r}")
