"""`Parquet`: rows of Parquet files by number, row groups decoded once and kept while memory lasts.

The row groups of Parquet files: what they hold, checked against each other, and each decoded by its number.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.caches import LoadingCache, LRUCache, PerProcess
from feedline.core.dataset import digest_of
from feedline.core.tensors import Allocator, within
from feedline.core.threads import BoundedMap
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.file_objects import merge_ranges
from feedline.datasets.formats import FORMATS, KeptShards, ShardSummary
from feedline.datasets.indexes import place_of
from feedline.datasets.paths import Paths, columns_of, data_files, paths_of
from feedline.datasets.tables.base import CACHE_NBYTES, ChunkCache, TableDataset
from feedline.datasets.tables.chunks import StructChunk, parted
from feedline.datasets.tables.columns import Int64s
from feedline.datasets.tables.filters import Filters, Partitions
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.parquet_files import (
    WHAT,
    Files,
    FilesystemFiles,
    Footers,
    StoredFiles,
    Summary,
    naming,
    refuse_two_readers,
)
from feedline.datasets.tables.types import StructType, kinds_of, pyarrow, refuse_different
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache, CachedStore, ObjectNotFoundError, ObjectRange, StoreError
from feedline.stores.base import Range
from feedline.stores.urls import absolute

T = TypeVar("T")


_PLANS = 4096


_LIMIT_NBYTES = 256 << 20
"""So much is held at once while rows are looked for."""


_LARGE_NBYTES = 2 << 30


_PIECES = (16, 256, 4096)


class RowGroupWarning(RuntimeWarning):
    """A row group is so large that decoding it takes much of the memory."""


class _RowGroupPlan(NamedTuple):
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
        self._plans: PerProcess[LRUCache[int, _RowGroupPlan]] = PerProcess(partial(LRUCache, _PLANS))
        self._concurrently = BoundedMap()
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

    def ranges(self, groups: Sequence[int]) -> list[tuple[CachedStore, ObjectRange]]:
        """What decoding these row groups wants from caches."""
        if self._files.is_local:
            return []
        return self._files.ranges(
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

    def _plan(self, group: int) -> _RowGroupPlan:
        """Of the columns that make samples."""
        plans = self._plans()
        found = plans.get(group)
        names = [name for name, _ in self.kind.fields]
        return plans.put(group, self._planned(group, names)) if found is None else found

    def _planned(self, group: int, names: Sequence[str]) -> _RowGroupPlan:
        file, number = self._place(group)
        row_group = self._footers.metadata(file).row_group(number)
        chosen = [each for each in map(row_group.column, range(row_group.num_columns)) if _is_of(each, set(names))]
        spans = merge_ranges([_span(each) for each in chosen])
        if not all(0 <= start <= stop <= self._files.nbytes(file) for start, stop in spans):
            raise SampleError(
                f"row group {number} of {self._files.names[file]} cannot be read: its footer names bytes that the file"
                " does not have; write it again or leave it out"
            )
        return _RowGroupPlan(spans, sum(each.total_uncompressed_size for each in chosen))


def _kind(
    summaries: Sequence[Summary],
    names: Sequence[str],
    partitions: Partitions,
    columns: Sequence[str] | None,
    filters: Filters | None,
) -> StructType:
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


class Parquet(TableDataset):
    """Rows of Parquet files as samples: dicts by column, with the dtypes that are stored.

    `paths` is a path or address, a folder of `.parquet` files, a glob or brace pattern, or a list of them; with
    `filesystem` (of `pyarrow.fs`), paths within it. What in a folder begins with `_` or `.` is left out. Numbers,
    booleans, times (the integers stored: days, microseconds, ...) and decimals (as float64) become tensors; lists of
    numbers tensors of one dimension more; texts `str` and `bytes`; structs dicts; other lists stay lists, and maps are
    lists of dicts with `key` and `value`. Folders named `year=2024` make a column more. `nulls` says what stands for
    missing values: "raise", "nan", a value, `[]` for lists, a tuple of which the first that fits counts, or a dict of
    these by column or member ("image.path"). `filters` are pyarrow's `[("year", ">", 2020), ...]`, all of which must
    hold, or a list of such lists, one of which must; of row groups that cannot match, by their folders or statistics,
    nothing is read.

    Row groups are the shards. One is decoded whole when a row of it is needed; decoded ones are kept, per process,
    within `cache_nbytes`. So any order is fast while the decoded columns fit there; for larger data
    `samplers.ShardShuffled(dataset.shard_sizes, seed, window)` decodes each row group about once.

    Of objects in stores only the chosen columns are read, those of all row groups of a batch at once, through `cache`
    if it is given; `options` are those of `open_store`. Their footers are kept on this machine, in the folder
    `index_dir`.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        filters: Sequence[Any] | None = None,
        nulls: Any = "raise",
        transform: Transform | None = None,
        cache_nbytes: int = CACHE_NBYTES,
        filesystem: Any = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
        index_dir: Pathlike | None = None,
    ) -> None:
        pyarrow(WHAT)
        refuse_two_readers(filesystem, cache=cache, options=options)
        asked, columns = paths_of(paths), columns_of(columns)
        given = [os.fspath(path) for path in asked]
        files: Files
        if filesystem is None:
            files = StoredFiles(data_files(asked, FORMATS["parquet"].pattern, cache=cache, options=options))
        else:
            files = FilesystemFiles(filesystem, asked)
        wanted = None if filters is None else Filters(filters)
        footers = _footers(files, given, index_dir)
        self._groups = RowGroups(files, footers, Partitions(files.names, given), columns, wanted)
        self.kind = self._groups.kind
        checked = Nulls(nulls)
        checked.check(self.kind)
        self._names = files.names
        self._kept = ChunkCache(self._groups, checked, cache_nbytes)
        self._chosen: NDArray[np.int32] | None = None
        sizes = self._groups.sizes
        if wanted is not None:
            chosen = self._groups.rows_where(wanted)
            if sizes.any() and not any(map(len, chosen)):
                raise ArgumentError(
                    f"filters={filters!r} leave none of the {sizes.sum()} rows of {files.names[0]}"
                    f"{f' and {len(files.names) - 1} more' * (len(files.names) > 1)}: check their values"
                )
            sizes = np.array([len(rows) for rows in chosen], np.int64)
            self._chosen = np.concatenate([np.empty(0, np.int32), *chosen])
        super().__init__(sizes, transform)

    @property
    def decoded(self) -> LoadingCache[int, StructChunk]:
        """The decoded row groups of this process, by number: their bytes, and how many were decoded so far."""
        return self._kept.decoded

    @property
    def listing_fingerprint(self) -> str:
        """Of the names of the files in their order, and the rows of each row group, for a loader's state."""
        return digest_of(self._names, self.shard_sizes)

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """What reading these samples will want from which cache, so that a loader can fetch it before."""
        which, _ = self._places(within(indices, len(self), type(self).__name__))
        return self._groups.ranges(np.unique(which).tolist())

    def _places(self, inside: Int64s) -> tuple[Int64s, Int64s]:
        which, rows = super()._places(inside)
        return which, rows if self._chosen is None else self._chosen[inside].astype(np.int64)

    def _samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        return self._kept.samples(which, rows)

    def _batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> Any:
        return self._kept.batch(which, rows, empty)


def _footers(files: Files, given: Sequence[str], index_dir: Pathlike | None) -> Footers:
    return Footers(files, place_of("parquet-footers", map(absolute, given), index_dir))


def summarize_row_groups(paths: Sequence[str]) -> ShardSummary:
    """The row groups of Parquet files; their footers are kept where the dataset keeps them."""
    pyarrow(WHAT)
    files = StoredFiles(data_files(paths, FORMATS["parquet"].pattern, cache=None, options=None))
    footers = _footers(files, paths, None)
    footers.summaries()  # fetches those of many objects at once
    described = (footers.metadata(number) for number in range(len(files.names)))
    groups = [file.row_group(number) for file in described for number in range(file.num_row_groups)]
    stored = [sum(group.column(at).total_compressed_size for at in range(group.num_columns)) for group in groups]
    kept = KeptShards(CACHE_NBYTES, [group.total_byte_size for group in groups])
    return ShardSummary("row group", [group.num_rows for group in groups], stored, kept)
