"""Random access to rows of Parquet files, with cached row groups.

`RowGroups` numbers the row groups of all files, checks that their columns agree, and decodes them. `Parquet` reads
samples from them through `ChunkCache`.
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
from feedline.datasets.paths import Paths, columns_of, paths_of
from feedline.datasets.tables.base import CACHE_NBYTES, ChunkCache, TableDataset
from feedline.datasets.tables.chunks import StructChunk, chunk_of_chunked
from feedline.datasets.tables.columns import Int64s
from feedline.datasets.tables.data_files import data_files, folder_values
from feedline.datasets.tables.filters import Filters, Partitions
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.parquet_files import (
    WHAT,
    Files,
    FilesystemFiles,
    Footers,
    StoredFiles,
    Summary,
    check_single_reader,
    naming,
)
from feedline.datasets.tables.snapshots import TableColumns
from feedline.datasets.tables.types import (
    StructType,
    check_same_columns,
    column_names,
    kinds_of,
    merge_columns,
    present,
    pyarrow,
)
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache, CachedStore, ObjectNotFoundError, ObjectRange, StoreError
from feedline.stores.base import Range
from feedline.stores.urls import absolute

T = TypeVar("T")


_PLANS = 4096
"""Row groups whose plans are cached."""


_LIMIT_NBYTES = 256 << 20
"""Memory for row groups that are decoded at once to filter their rows."""


_LARGE_NBYTES = 2 << 30


_PIECES = (16, 256, 4096)
"""Numbers of pieces to try for a row group that pyarrow cannot decode whole."""


class RowGroupWarning(RuntimeWarning):
    """Warns of a row group that takes much memory to decode."""


class _RowGroupPlan(NamedTuple):
    """Byte ranges of a row group, and its approximate decoded size."""

    spans: list[Range]
    nbytes: int


class RowGroups:
    """The row groups of all files, in order.

    Holds no open files; pickles without the footers.
    """

    def __init__(
        self,
        files: Files,
        footers: Footers,
        partitions: Partitions,
        columns: Sequence[str] | None,
        filters: Filters | None,
        table: TableColumns | None,
    ) -> None:
        self._files, self._footers, self._partitions = files, footers, partitions
        summaries = footers.summaries()
        self.kind = _kind(summaries, files.names, partitions, columns, filters, table)
        sizes = [np.frombuffer(summary.sizes, "<i8") for summary in summaries]
        self.sizes: NDArray[np.int64] = np.concatenate(sizes).astype(np.int64)
        self._first = np.cumsum([0, *map(len, sizes)])
        self._plans: PerProcess[LRUCache[int, _RowGroupPlan]] = PerProcess(partial(LRUCache, _PLANS))
        self._bounded_map = BoundedMap()
        self._warn_of_large([summary.largest_nbytes for summary in summaries])

    def decoded(self, group: int) -> StructChunk:
        """Decode the chosen columns of a row group."""
        columns = self._columns(group, [name for name, _ in self.kind.fields])
        with naming(self._describe(group)):
            return StructChunk(tuple(chunk_of_chunked(kind, columns[name]) for name, kind in self.kind.fields))

    def each(self, work: Callable[[int], T], groups: Sequence[int], limit_nbytes: int) -> Iterator[T]:
        """Map `work` over row groups, in order.

        Those of remote files run ahead in threads, within `limit_nbytes` of decoded data.
        """
        if self._files.is_local:
            return map(work, groups)
        return self._bounded_map.map(work, groups, lambda group: self._plan(group).nbytes, limit_nbytes)

    def rows_where(self, filters: Filters) -> list[NDArray[np.int32]]:
        """The matching rows of each row group.

        Row groups that cannot match, by partition columns or statistics, are not read.
        """
        matching = [np.empty(0, np.int32)] * len(self.sizes)
        candidates = []
        for file in np.flatnonzero(filters.files(self._partitions, len(self._files.names))).tolist():
            groups = range(int(self._first[file]), int(self._first[file + 1]))
            if set(filters.names) <= set(self._partitions.names):
                for group in groups:
                    matching[group] = np.arange(self.sizes[group], dtype=np.int32)
            else:
                candidates += [groups[number] for number in self._possible(file, filters)]
        rows = self.each(partial(self._rows_where, filters), candidates, _LIMIT_NBYTES)
        for group, each in zip(candidates, rows, strict=True):
            matching[group] = each
        return matching

    def ranges(self, groups: Sequence[int]) -> list[tuple[CachedStore, ObjectRange]]:
        """The ranges that decoding these row groups reads through caches."""
        if self._files.is_local:
            return []
        return self._files.ranges(
            [(self._place(group)[0], span) for group in groups for span in self._plan(group).spans]
        )

    def locate(self, group: int, row: int) -> str:
        """Describe a row by its file and its number there."""
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
        """Columns of a row group by name, as Arrow's chunked arrays."""
        file, _ = self._place(group)
        partitioned = set(self._partitions.names)
        stored = [name for name in names if name not in partitioned]
        table = self._table(group, stored) if stored else None
        found = {} if table is None else dict(zip(table.column_names, table.columns, strict=True))
        rows, arrow = int(self.sizes[group]), pyarrow(WHAT)
        for name in partitioned & set(names):
            found[name] = arrow.chunked_array([self._partitions.column(name, file, rows)])
        # A file that is older than a column of its table has nulls there.
        return {name: found[name] if name in found else arrow.chunked_array([arrow.nulls(rows)]) for name in names}

    def _table(self, group: int, names: Sequence[str]) -> Any:
        file, number = self._place(group)
        spans = [] if self._files.is_local else self._make_plan(group, names).spans
        try:
            with self._files.opened(file, self._footers.metadata(file), spans) as opened, naming(self._describe(group)):
                return _read(opened, number, list(names))
        except FileNotFoundError as error:
            if isinstance(error, StoreError):
                raise
            raise ObjectNotFoundError(
                f"{self._describe(group)} cannot be read: the file has been removed since this dataset was created;"
                " restore it or re-create the dataset"
            ) from error

    def _describe(self, group: int) -> str:
        file, number = self._place(group)
        return f"row group {number} of {self._files.names[file]}"

    def _warn_of_large(self, largest: Sequence[int]) -> None:
        """Warn of the first row group whose chosen columns are large."""
        limit = _large_nbytes()
        # The largest row group in all columns rules out most files without a look at their footers.
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
                f"{self._describe(group)} has {self._plan(group).nbytes / (1 << 30):.1f} GiB in the columns that are"
                " read, and each process decodes it as a whole; choose fewer columns with columns=[...], or rewrite"
                " the files with smaller row groups (row_group_size= of pyarrow.parquet.write_table)",
                RowGroupWarning,
                stacklevel=4,
            )

    def _plan(self, group: int) -> _RowGroupPlan:
        """The plan for the columns of samples, cached."""
        plans = self._plans()
        plan = plans.get(group)
        names = [name for name, _ in self.kind.fields]
        return plans.put(group, self._make_plan(group, names)) if plan is None else plan

    def _make_plan(self, group: int, names: Sequence[str]) -> _RowGroupPlan:
        file, number = self._place(group)
        row_group = self._footers.metadata(file).row_group(number)
        chosen = [each for each in map(row_group.column, range(row_group.num_columns)) if _is_of(each, set(names))]
        spans = merge_ranges([_span(each) for each in chosen])
        if not all(0 <= start <= stop <= self._files.nbytes(file) for start, stop in spans):
            raise SampleError(
                f"row group {number} of {self._files.names[file]} cannot be read: its footer refers to bytes beyond"
                " the end of the file; re-create the file or leave it out"
            )
        return _RowGroupPlan(spans, sum(each.total_uncompressed_size for each in chosen))


def _kind(
    summaries: Sequence[Summary],
    names: Sequence[str],
    partitions: Partitions,
    columns: Sequence[str] | None,
    filters: Filters | None,
    table: TableColumns | None,
) -> StructType:
    """The type of a sample, checked to agree between files.

    Also chooses the partition columns.
    """
    arrow = pyarrow(WHAT)
    first: dict[bytes, str] = {}
    for summary, name in zip(summaries, names, strict=True):
        first.setdefault(summary.schema, name)
    schemas, paths = [arrow.ipc.read_schema(arrow.py_buffer(text)) for text in first], list(first.values())
    also = [] if filters is None else filters.names
    partitions.choose({name for schema in schemas for name in schema.names}, columns and [*columns, *also])
    extended = [partitions.extended(schema) for schema in schemas]
    for schema, path in zip(extended, paths, strict=True):
        if also:
            kinds_of(schema, also, path)  # raises if a filtered column is missing
    if table is not None:
        return _kind_of_table(extended, paths, columns, table)
    kinds = [kinds_of(schema, columns, path) for schema, path in zip(extended, paths, strict=True)]
    check_same_columns(kinds, paths)
    return kinds[0]


def _kind_of_table(
    schemas: Sequence[Any], paths: Sequence[str], columns: Sequence[str] | None, table: TableColumns
) -> StructType:
    """The type of a sample where older files may lack columns."""
    wanted = list(table.names if columns is None else columns)
    for schema, path in zip(schemas, paths, strict=True):
        table.check(schema, column_names(wanted, table.names), path)
    known = [present(wanted, schema) for schema in schemas]
    missing = set(wanted).difference(*known)
    if columns is not None and missing:
        kinds_of(schemas[0], [*missing], paths[0])  # raises: no file has the column
    kinds = [
        kinds_of(schema, names, path) if names else StructType(())
        for schema, names, path in zip(schemas, known, paths, strict=True)
    ]
    return merge_columns(kinds, paths, column_names(wanted, table.names))


def _read(opened: Any, number: int, names: list[str]) -> Any:
    """Read columns of a row group as a table.

    In several batches if pyarrow cannot make a single one.
    """
    # Worker processes set torch to one thread, and must not start one per core here.
    options = {"columns": names, "use_threads": torch.get_num_threads() > 1}
    try:
        return opened.read_row_group(number, **options)
    except pyarrow(WHAT).ArrowNotImplementedError:  # more than 2 GiB of texts in lists or structs
        for pieces in _PIECES:
            with suppress(pyarrow(WHAT).ArrowNotImplementedError):
                return read_in_pieces(opened, number, pieces, options)
        raise


def read_in_pieces(opened: Any, number: int, pieces: int, options: dict[str, Any]) -> Any:
    """Read columns of a row group in about `pieces` batches."""
    rows = opened.metadata.row_group(number).num_rows
    batches = opened.iter_batches(-(-rows // pieces), row_groups=[number], **options)
    return pyarrow(WHAT).Table.from_batches(list(batches))


def _large_nbytes() -> int:
    """A quarter of the machine's memory, at most 2 GiB."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return _LARGE_NBYTES
    return min(_LARGE_NBYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)


def _is_of(column: Any, names: set[str]) -> bool:
    """Check if a leaf column belongs to one of these."""
    path = column.path_in_schema
    return path in names or any(path[:at] in names for at, character in enumerate(path) if character == ".")


def _span(column: Any) -> Range:
    """The byte range of a column chunk, its dictionary included."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    return start, start + column.total_compressed_size


class Parquet(TableDataset):
    """Rows of Parquet files as dicts by column.

    `paths` is a path or URL, a folder of `.parquet` files, a glob or brace pattern, or a list of these. With
    `filesystem` (of `pyarrow.fs`), paths are those of that filesystem. Names in a folder that begin with `_` or `.` are
    skipped. `columns` are names of columns or of their members ("image.bytes"); None means all.

    Numbers, booleans, times (the stored integers: days, microseconds, ...) and decimals (as float64) become tensors.
    Lists of numbers become tensors with one more dimension. Texts become `str` or `bytes`, structs dicts, other lists
    lists, and maps lists of dicts with `key` and `value`. A folder named `year=2024` adds a column `year`.

    `nulls` is the policy for nulls: "raise", "nan", a fill value, `[]` for lists, a tuple of alternatives of which the
    first that fits is used, or a dict of these by column or member ("image.path").

    `filters` are as in pyarrow: a list of `(column, operator, value)` tuples, all of which have to match, or a list of
    such lists, any of which has to. Row groups that cannot match, by their folders or statistics, are not read.

    Row groups are the shards. A row group is decoded whole when one of its rows is needed. Each process caches decoded
    row groups within `cache_nbytes`. Any order is fast while the decoded columns fit there; for larger data,
    `samplers.ShardShuffled(dataset.shard_sizes, seed, window)` decodes each row group about once.

    From stores only the chosen columns are read, for all row groups of a batch at once, through `cache` if it is given;
    `options` are those of `open_store`. Footers of remote files are cached on this machine, in the folder `index_dir`.
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
        check_single_reader(filesystem, cache=cache, options=options)
        path_list, columns = paths_of(paths), columns_of(columns)
        texts = [os.fspath(path) for path in path_list]
        files: Files
        table: TableColumns | None = None
        if filesystem is None:
            data = data_files(path_list, FORMATS["parquet"].pattern, cache=cache, options=options)
            files, table = StoredFiles(data.files), data.table
            partitions = Partitions(data.files.names, data.partitions, data.types)
        else:
            files = FilesystemFiles(filesystem, path_list)
            partitions = Partitions(files.names, folder_values(files.names, texts))
        row_filters = None if filters is None else Filters(filters)
        footers = _footers(files, texts, index_dir)
        self._groups = RowGroups(files, footers, partitions, columns, row_filters, table)
        self.kind = self._groups.kind
        null_policy = Nulls(nulls)
        null_policy.check(self.kind)
        self._names = files.names
        self._chunks = ChunkCache(self._groups, null_policy, cache_nbytes)
        self._matching: NDArray[np.int32] | None = None
        sizes = self._groups.sizes
        if row_filters is not None:
            matching = self._groups.rows_where(row_filters)
            if sizes.any() and not any(map(len, matching)):
                raise ArgumentError(
                    f"filters={filters!r} match none of the {sizes.sum()} rows of {files.names[0]}"
                    f"{f' and {len(files.names) - 1} more' * (len(files.names) > 1)}: check their values"
                )
            sizes = np.array([len(rows) for rows in matching], np.int64)
            self._matching = np.concatenate([np.empty(0, np.int32), *matching])
        super().__init__(sizes, transform)

    @property
    def decoded(self) -> LoadingCache[int, StructChunk]:
        """The decoded row groups of this process, by number."""
        return self._chunks.decoded

    @property
    def listing_fingerprint(self) -> str:
        """A digest of file names in order and row group sizes."""
        return digest_of(self._names, self.shard_sizes)

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """The ranges to fetch into caches before these samples are read."""
        which, _ = self._places(within(indices, len(self), type(self).__name__))
        return self._groups.ranges(np.unique(which).tolist())

    def _places(self, inside: Int64s) -> tuple[Int64s, Int64s]:
        which, rows = super()._places(inside)
        return which, rows if self._matching is None else self._matching[inside].astype(np.int64)

    def _samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        return self._chunks.samples(which, rows)

    def _batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> Any:
        return self._chunks.batch(which, rows, empty)


def _footers(files: Files, paths: Sequence[str], index_dir: Pathlike | None) -> Footers:
    return Footers(files, place_of("parquet-footers", map(absolute, paths), index_dir))


def summarize_row_groups(paths: Sequence[str]) -> ShardSummary:
    """Row counts and sizes of the row groups of Parquet files.

    Uses and fills the same footer cache as `Parquet`.
    """
    pyarrow(WHAT)
    files = StoredFiles(data_files(paths, FORMATS["parquet"].pattern, cache=None, options=None).files)
    footers = _footers(files, paths, None)
    footers.summaries()  # fetches the footers of many objects concurrently
    metadata = (footers.metadata(number) for number in range(len(files.names)))
    groups = [file.row_group(number) for file in metadata for number in range(file.num_row_groups)]
    stored = [sum(group.column(at).total_compressed_size for at in range(group.num_columns)) for group in groups]
    kept = KeptShards(CACHE_NBYTES, [group.total_byte_size for group in groups])
    return ShardSummary("row group", [group.num_rows for group in groups], stored, kept)
