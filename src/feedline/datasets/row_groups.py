"""The row groups of Parquet files: what they hold, checked against each other, and each decoded by its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.datasets.chunks import StructChunk, chunk_of
from feedline.datasets.concurrently import Concurrently
from feedline.datasets.hive import Partitions
from feedline.datasets.kinds import Struct, kinds_of, pyarrow, refuse_different
from feedline.datasets.parquet_files import WHAT, Files, naming
from feedline.datasets.parquet_footers import Footers, Summary
from feedline.datasets.row_filters import Filters
from feedline.datasets.sparse import joined
from feedline.errors import SampleError
from feedline.per_process import PerProcess
from feedline.stores import CachedStore, Want
from feedline.stores.protocol import Range
from feedline.stores.recent import Recent

T = TypeVar("T")

_PLANS = 4096
_LIMIT_NBYTES = 256 << 20
"""So much is held at once while rows are looked for."""


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

    def decoded(self, group: int) -> StructChunk:
        """The columns of a row group."""
        arrays = self._arrays(group, [name for name, _ in self.kind.fields])
        return StructChunk(tuple(chunk_of(kind, arrays[name]) for name, kind in self.kind.fields))

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
        table = pyarrow(WHAT).table(self._arrays(group, filters.names))
        return filters.rows(self._files.names[self._place(group)[0]], table)

    def _arrays(self, group: int, names: Sequence[str]) -> dict[str, Any]:
        """The columns of a row group by name, as Arrow arrays."""
        file, _ = self._place(group)
        told = set(self._partitions.names)
        stored = [name for name in names if name not in told]
        found = dict(zip(stored, self._batch(group, stored).columns, strict=True)) if stored else {}
        rows = int(self.sizes[group])
        return {name: self._partitions.column(name, file, rows) if name in told else found[name] for name in names}

    def _batch(self, group: int, names: Sequence[str]) -> Any:
        file, number = self._place(group)
        what = f"row group {number} of {self._files.names[file]}"
        spans = [] if self._files.is_local else self._planned(group, names).spans
        with self._files.opened(file, self._footers.metadata(file), spans) as opened, naming(what):
            # a worker process has one thread of torch's, and takes one here
            table = opened.read_row_group(number, columns=list(names), use_threads=torch.get_num_threads() > 1)
            batches = table.select(list(names)).combine_chunks().to_batches()
        if len(batches) != 1:
            raise SampleError(f"{what} holds more than 2 GiB in one column; write it again in smaller ones")
        return batches[0]

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
