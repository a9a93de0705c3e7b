"""`Arrow`: rows of Arrow files, memory-mapped, or of a table in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from feedline.datasets.arrays import Transform
from feedline.datasets.chunks import table_chunk
from feedline.datasets.columns import Nulls
from feedline.datasets.kinds import Struct, difference, kinds_of, pyarrow
from feedline.datasets.paths import Paths, Version, matching, refuse_changed, version
from feedline.datasets.spans import Int64s
from feedline.datasets.tables import ChunkRows, TableDataset
from feedline.errors import SampleError
from feedline.rows import Empty


class Arrow(TableDataset):
    """Rows of Arrow IPC files or streams (Feather 2, and the cache files of Hugging Face, too), or of a table.

    `source` is a path, a folder of `.arrow` files, a glob or brace pattern, a list of them, or a `pyarrow.Table`.
    Samples are dicts by column: see `Parquet` for what the types become, and for `nulls`. Files are memory-mapped and
    read in place; compressed ones are decompressed into memory when they are opened. Record batches are the shards.
    Pickles by path; a table in memory by its buffers, out of band where the pickler can.
    """

    def __init__(
        self,
        source: Any,
        columns: Sequence[str] | None = None,
        *,
        nulls: Any = "raise",
        transform: Transform | None = None,
    ) -> None:
        arrow = pyarrow("datasets.Arrow")
        self._source = _Table(source) if isinstance(source, arrow.Table) else _Files(source)
        self.kind = self._source.kind(columns)
        self._nulls = Nulls(nulls)
        self._nulls.check(self.kind)
        sizes = [batch.num_rows for batch in self._source.batches(columns)]
        super().__init__(np.array(sizes, np.int64), transform)
        self._rows: ChunkRows | None = None

    def _opened(self) -> ChunkRows:
        rows = self._rows
        if rows is None:
            names = [name for name, _ in self.kind.fields]
            chunks = [table_chunk(self.kind, batch) for batch in self._source.batches(names)]
            rows = ChunkRows(self.kind, chunks, self._nulls, self._locate)
            self._rows = rows  # two threads may both have opened the files: either result serves
        return rows

    def _samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        return self._opened().samples(which, rows) if len(rows) else []

    def _batch(self, which: Int64s, rows: Int64s, empty: Empty) -> Any:
        return self._opened().batch(which, rows, empty)

    def _locate(self, chunk: int, row: int) -> str:
        return self._source.locate(chunk, row, self._bounds)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}


class _Table:
    """A table in memory."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def kind(self, columns: Sequence[str] | None) -> Struct:
        return kinds_of(self._table.schema, columns, "the table")

    def batches(self, columns: Sequence[str] | None) -> list[Any]:
        """The record batches, without empty ones: the columns of a table may be cut differently."""
        table = self._table if columns is None else self._table.select(list(columns))
        return [batch for batch in table.to_batches() if batch.num_rows]

    @staticmethod
    def locate(chunk: int, row: int, bounds: Int64s) -> str:
        return f"row {int(bounds[chunk]) + row} of the table"


class _Files:
    """Arrow files by absolute path, mapped on first use and again where they are unpickled."""

    def __init__(self, paths: Paths) -> None:
        self.paths = matching(paths, "**/*.arrow")
        self._versions = [version(path) for path in self.paths]
        self._tables: list[list[Any]] | None = None
        self._counts = list(accumulate((len(batches) for batches in self._mapped()), initial=0))

    def _mapped(self) -> list[list[Any]]:
        if self._tables is None:
            self._tables = [_batches(path, was) for path, was in zip(self.paths, self._versions, strict=True)]
        return self._tables

    def kind(self, columns: Sequence[str] | None) -> Struct:
        kinds = [kinds_of(_schema(path), columns, path) for path in self.paths]
        refuse_different(kinds, self.paths)
        return kinds[0]

    def batches(self, _: Sequence[str] | None) -> list[Any]:
        return [batch for batches in self._mapped() for batch in batches]

    def locate(self, chunk: int, row: int, bounds: Int64s) -> str:
        file = int(np.searchsorted(self._counts, chunk, side="right")) - 1
        return f"{self.paths[file]}, row {int(bounds[chunk] - bounds[self._counts[file]]) + row}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": None}


def refuse_different(kinds: Sequence[Struct], paths: Sequence[str]) -> None:
    """Raise `SampleError` naming both files and the column where files do not have the same columns."""
    for kind, path in zip(kinds, paths, strict=True):
        if [name for name, _ in kind.fields] != [name for name, _ in kinds[0].fields]:
            ours, theirs = ({name for name, _ in each.fields} for each in (kinds[0], kind))
            raise SampleError(
                f"{path} and {paths[0]} do not have the same columns: {', '.join(sorted(ours ^ theirs)) or 'the order'}"
                " differs; name those that all files have with columns=[...]"
            )
        unlike = difference(kinds[0], kind)
        if unlike is not None:
            name, one, other = unlike
            raise SampleError(
                f"column {name!r} is {one} in {paths[0]}, but {other} in {path}; write one of them again with the"
                " type of the other, or read them as two datasets"
            )


def _reader(path: str) -> Any:
    """The reader of a file or a stream in a memory map."""
    arrow = pyarrow("datasets.Arrow")
    try:
        mapped = arrow.memory_map(path)
        is_file = mapped.size() >= 8 and mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        return arrow.ipc.open_file(mapped) if is_file else arrow.ipc.open_stream(mapped)
    except (arrow.ArrowInvalid, OSError, EOFError) as error:
        raise _damaged(path, error) from error


def _schema(path: str) -> Any:
    return _reader(path).schema


def _batches(path: str, was: Version) -> list[Any]:
    refuse_changed(path, was, version(path))
    arrow = pyarrow("datasets.Arrow")
    try:
        return [batch for batch in _reader(path).read_all().to_batches() if batch.num_rows]
    except (arrow.ArrowInvalid, OSError, EOFError) as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> SampleError:
    return SampleError(f"{path} is no whole Arrow file or stream ({error}); write it again, or leave it out")
