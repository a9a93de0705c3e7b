"""The row groups of Parquet files: what they hold, checked against each other, and each decoded by its number."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.datasets.chunks import StructChunk, parted
from feedline.datasets.concurrently import Concurrently
from feedline.datasets.hive import Partitions
from feedline.datasets.kinds import Struct, kinds_of, pyarrow, refuse_different
from feedline.datasets.parquet_files import WHAT, Files, naming
from feedline.datasets.parquet_footers import Footers, Summary
from feedline.datasets.row_filters import Filters
from feedline.datasets.sparse import joined
from feedline.errors import SampleError
from feedline.per_process import PerProcess
from feedline.stores import CachedStore, ObjectNotFoundError, StoreError, Want
from feedline.stores.protocol import Range
from feedline.stores.recent import Recent

T = TypeVar("T")

_PLANS = 4096
_LIMIT_NBYTES = 256 << 20
"""So much is held at once while rows are looked for."""
_LARGE_NBYTES = 2 << 30
_PIECES = (16, 256, 4096)


class RowGroupWarning(RuntimeWarning):
    """A row group is so large that decoding it takes much of the memory."""


class _Plan(NamedTuple):
    """What decoding a row group reads, and the bytes that come out, about."""

    spans: list[Range]
    nbytes: int


class RowGroups:
    """The row groups of all files, in order. Holds no open file; pickles as a description."""

    def __init__(
        self,
        files: Files,
        footers: Footers,
        partitions: Partitions,
        columns: Sequence[str] | None,
        filters: Filters | None,
    ) -> None:
        self._files, self._footers, self._partitions = files, footers, partitions
        summaries = footers.summaries()
        self.kind = _kind(summaries, files.names, partitions, columns, filters)
        sizes = [np.frombuffer(summary.sizes, "<i8") for summary in summaries]
        self.sizes: NDArray[np.int64] = np.concatenate(sizes).astype(np.int64)
        self._first = np.cumsum([0, *map(len, sizes)])
        self._plans: PerProcess[Recent[int, _Plan]] = PerProcess(partial(Recent, _PLANS))
        self._concurrently = Concurrently()
        self._warn_of_large([summary.largest_nbytes for summary in summaries])

    def decoded(self, group: int) -> StructChunk:
        """The columns of a row group."""
        columns = self._columns(group, [name for name, _ in self.kind.fields])
        with naming(self._called(group)):
            return StructChunk(tuple(parted(kind, columns[name]) for name, kind in self.kind.fields))

    def each(self, work: Callable[[int], T], groups: Sequence[int], limit_nbytes: int) -> Iterator[T]:
        """`work` of each of these row groups, in order; what is far away is worked on ahead, several at once."""
        if self._files.is_local:
            return map(work, groups)
        return self._concurrently.map(work, groups, lambda group: self._plan(group).nbytes, limit_nbytes)

    def rows_where(self, filters: Filters) -> list[NDArray[np.int32]]:
        """For each row group, the rows that are wanted; most that have none are not read."""
        found = [np.empty(0, np.int32)] * len(self.sizes)
        candidates = []
        for file in np.flatnonzero(filters.files(self._partitions, len(self._files.names))).tolist():
            groups = range(int(self._first[file]), int(self._first[file + 1]))
            if set(filters.names) <= set(self._partitions.names):
                for group in groups:
                    found[group] = np.arange(self.sizes[group], dtype=np.int32)
            else:
                candidates += [groups[number] for number in self._possible(file, filters)]
        rows = self.each(partial(self._rows_where, filters), candidates, _LIMIT_NBYTES)
        for group, each in zip(candidates, rows, strict=True):
            found[group] = each
        return found

    def wants(self, groups: Sequence[int]) -> list[tuple[CachedStore, Want]]:
        """What decoding these row groups wants from caches."""
        if self._files.is_local:
            return []
        return self._files.wants(
            [(self._place(group)[0], span) for group in groups for span in self._plan(group).spans]
        )

    def locate(self, group: int, row: int) -> str:
        """A row of a row group, as the file knows it."""
        file, number = self._place(group)
        before = int(self.sizes[group - number : group].sum())
        return f"{self._files.names[file]}, row {before + row} (row group {number})"

    def _place(self, group: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first, group, side="right")) - 1
        return file, group - int(self._first[file])

    def _possible(self, file: int, filters: Filters) -> list[int]:
        path = self._files.names[file]
        schema = self._partitions.extended(self._footers.metadata(file).schema.to_arrow_schema())
        return filters.row_groups(path, self._footers.footer(file), schema, self._partitions.values(file))

    def _rows_where(self, filters: Filters, group: int) -> NDArray[np.int32]:
        table = pyarrow(WHAT).table(self._columns(group, filters.names))
        return filters.rows(self._files.names[self._place(group)[0]], table)

    def _columns(self, group: int, names: Sequence[str]) -> dict[str, Any]:
        """The columns of a row group by name, as chunked arrays of Arrow's."""
        file, _ = self._place(group)
        told = set(self._partitions.names)
        stored = [name for name in names if name not in told]
        table = self._table(group, stored) if stored else None
        rows = int(self.sizes[group])
        return {
            name: table.column(name)
            if table is not None and name not in told
            else pyarrow(WHAT).chunked_array([self._partitions.column(name, file, rows)])
            for name in names
        }

    def _table(self, group: int, names: Sequence[str]) -> Any:
        file, number = self._place(group)
        spans = [] if self._files.is_local else self._planned(group, names).spans
        try:
            with self._files.opened(file, self._footers.metadata(file), spans) as opened, naming(self._called(group)):
                return _read(opened, number, list(names))
        except FileNotFoundError as error:
            if isinstance(error, StoreError):
                raise
            raise ObjectNotFoundError(
                f"{self._called(group)} cannot be read: the file was there when this dataset was made, and is gone;"
                " restore it, or make the dataset anew"
            ) from error

    def _called(self, group: int) -> str:
        file, number = self._place(group)
        return f"row group {number} of {self._files.names[file]}"

    def _warn_of_large(self, largest: Sequence[int]) -> None:
        """Warn of the first row group whose chosen columns are large; of most files their largest one tells enough."""
        limit = _large_nbytes()
        groups = (
            group
            for file, nbytes in enumerate(largest)
            if nbytes > limit
            for group in range(int(self._first[file]), int(self._first[file + 1]))
            if self._plan(group).nbytes > limit
        )
        group = next(groups, None)
        if group is not None:
            warnings.warn(
                f"{self._called(group)} has {self._plan(group).nbytes / (1 << 30):.1f} GiB in the columns that are"
                " read, and each process decodes it as a whole; choose fewer with columns=[...], or write the files"
                " again in smaller ones (row_group_size= of pyarrow.parquet.write_table)",
                RowGroupWarning,
                stacklevel=4,
            )

    def _plan(self, group: int) -> _Plan:
        """Of the columns that make samples."""
        plans = self._plans()
        found = plans.get(group)
        names = [name for name, _ in self.kind.fields]
        return plans.put(group, self._planned(group, names)) if found is None else found

    def _planned(self, group: int, names: Sequence[str]) -> _Plan:
        file, number = self._place(group)
        row_group = self._footers.metadata(file).row_group(number)
        chosen = [each for each in map(row_group.column, range(row_group.num_columns)) if _is_of(each, set(names))]
        spans = joined([_span(each) for each in chosen])
        if not all(0 <= start <= stop <= self._files.nbytes(file) for start, stop in spans):
            raise SampleError(
                f"row group {number} of {self._files.names[file]} cannot be read: its footer names bytes that the file"
                " does not have; write it again or leave it out"
            )
        return _Plan(spans, sum(each.total_uncompressed_size for each in chosen))


def _kind(
    summaries: Sequence[Summary],
    names: Sequence[str],
    partitions: Partitions,
    columns: Sequence[str] | None,
    filters: Filters | None,
) -> Struct:
    """The kind of a sample, which all files must have in common; chooses the partition columns that are wanted."""
    arrow = pyarrow(WHAT)
    first: dict[bytes, str] = {}
    for summary, name in zip(summaries, names, strict=True):
        first.setdefault(summary.schema, name)
    schemas = [arrow.ipc.read_schema(arrow.py_buffer(text)) for text in first]
    also = [] if filters is None else filters.names
    partitions.choose({name for schema in schemas for name in schema.names}, columns and [*columns, *also])
    extended = [partitions.extended(schema) for schema in schemas]
    kinds = [kinds_of(schema, columns, path) for schema, path in zip(extended, first.values(), strict=True)]
    refuse_different(kinds, list(first.values()))
    for schema, path in zip(extended, first.values(), strict=True):
        if also:
            kinds_of(schema, also, path)  # raises for a column that is not there
    return kinds[0]


def _read(opened: Any, number: int, names: list[str]) -> Any:
    """Columns of a row group as a table; in several batches where pyarrow cannot give one."""
    # a worker process has one thread of torch's, and takes one here
    options = {"columns": names, "use_threads": torch.get_num_threads() > 1}
    try:
        return opened.read_row_group(number, **options)
    except pyarrow(WHAT).ArrowNotImplementedError:  # more than 2 GiB of texts within lists or dicts
        for pieces in _PIECES:
            with suppress(pyarrow(WHAT).ArrowNotImplementedError):
                return in_pieces(opened, number, pieces, options)
        raise


def in_pieces(opened: Any, number: int, pieces: int, options: dict[str, Any]) -> Any:
    """Columns of a row group as a table of about so many chunks."""
    rows = opened.metadata.row_group(number).num_rows
    batches = opened.iter_batches(-(-rows // pieces), row_groups=[number], **options)
    return pyarrow(WHAT).Table.from_batches(list(batches))


def _large_nbytes() -> int:
    """From so many bytes on a row group is large: a quarter of what the machine has, or 2 GiB if that is less."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return _LARGE_NBYTES
    return min(_LARGE_NBYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)


def _is_of(column: Any, names: set[str]) -> bool:
    """Whether a leaf column is one of these, or a part of one."""
    path = column.path_in_schema
    return path in names or any(path[:at] in names for at, character in enumerate(path) if character == ".")


def _span(column: Any) -> Range:
    """The bytes of a column of a row group: its dictionary, if it has one, lies before its data."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    return start, start + column.total_compressed_size
