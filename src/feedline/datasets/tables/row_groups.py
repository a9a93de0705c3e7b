"""Row groups of Parquet files, numbered and decoded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.caches import LRUCache, PerProcess
from feedline.datasets.file_objects import merge_ranges
from feedline.datasets.signatures import damage_error
from feedline.datasets.tables.chunks import StructChunk, chunk_of_chunked
from feedline.datasets.tables.decoded import FileChunks
from feedline.datasets.tables.filters import Filters, Partitions
from feedline.datasets.tables.parquet_files import WHAT, Footers, ParquetFiles, Summary, naming
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
from feedline.stores import ObjectNotFoundError, StoreError
from feedline.stores.base import Range
from feedline.stores.files import Extent

_PLANS = 4096
"""Number of row groups whose plans are cached."""


_LIMIT_NBYTES = 256 << 20
"""Most bytes of row groups that are decoded at once to filter their rows."""


_LARGE_NBYTES = 2 << 30


_PIECES = (16, 256, 4096)
"""Numbers of pieces to try for a row group that pyarrow cannot decode as a whole."""


class RowGroupWarning(RuntimeWarning):
    """Warns of a row group that takes much memory to decode."""


class _RowGroupPlan(NamedTuple):
    """Byte ranges of a row group, and its approximate decoded size."""

    spans: list[Range]
    nbytes: int


class RowGroups(FileChunks[ParquetFiles]):
    """The row groups of all files, in order.

    Holds no open files; pickles without the footers.
    """

    def __init__(
        self,
        files: ParquetFiles,
        footers: Footers,
        partitions: Partitions,
        columns: Sequence[str] | None,
        filters: Filters | None,
        table: TableColumns | None,
    ) -> None:
        self._footers, self._partitions = footers, partitions
        summaries = footers.summaries()
        kind = _kind(summaries, files.names, partitions, columns, filters, table)
        super().__init__(files, kind, [np.frombuffer(summary.sizes, "<i8") for summary in summaries])
        self._plans: PerProcess[LRUCache[int, _RowGroupPlan]] = PerProcess(partial(LRUCache, _PLANS))
        self._warn_of_large([summary.largest_nbytes for summary in summaries])

    def decoded(self, group: int) -> StructChunk:
        """Decode the chosen columns of a row group."""
        columns = self._columns(group, [name for name, _ in self.kind.fields])
        with naming(self._describe(group)):
            return StructChunk(tuple(chunk_of_chunked(kind, columns[name]) for name, kind in self.kind.fields))

    def rows_where(self, filters: Filters) -> list[NDArray[np.int32]]:
        """The matching rows of each row group.

        Row groups that cannot match, by partition columns or statistics, are not read.
        """
        matching = [np.empty(0, np.int32)] * len(self.sizes)
        candidates = []
        for file in np.flatnonzero(filters.files(self._partitions, len(self._files.names))).tolist():
            groups = self._by_file.positions(file)
            if set(filters.names) <= set(self._partitions.names):
                for group in groups:
                    matching[group] = np.arange(self.sizes[group], dtype=np.int32)
            else:
                candidates += [groups[number] for number in self._possible(file, filters)]
        rows = self.each(partial(self._rows_where, filters), candidates, _LIMIT_NBYTES)
        for group, each in zip(candidates, rows, strict=True):
            matching[group] = each
        return matching

    def extents(self, group: int) -> list[Extent]:
        """The column chunks of the chosen columns of a row group."""
        file, _ = self.in_file(group)
        return [Extent(file, *span) for span in self._plan(group).spans]

    def nbytes(self, group: int) -> int:
        return self._plan(group).nbytes

    def locate(self, group: int, row: int) -> str:
        return f"{super().locate(group, row)} (row group {self.in_file(group)[1]})"

    def _possible(self, file: int, filters: Filters) -> list[int]:
        if self._files.decryption is not None:  # pyarrow's filters of row groups accept no keys
            return list(range(self._footers.metadata(file).num_row_groups))
        path = self._files.names[file]
        schema = self._partitions.extended(self._footers.metadata(file).schema.to_arrow_schema())
        return filters.row_groups(path, self._footers.footer(file), schema, self._partitions.values(file))

    def _rows_where(self, filters: Filters, group: int) -> NDArray[np.int32]:
        table = pyarrow(WHAT).table(self._columns(group, filters.names))
        return filters.rows(self._files.names[self.in_file(group)[0]], table)

    def _columns(self, group: int, names: Sequence[str]) -> dict[str, Any]:
        """Columns of a row group by name, as Arrow's chunked arrays."""
        file, _ = self.in_file(group)
        partitioned = set(self._partitions.names)
        stored = [name for name in names if name not in partitioned]
        table = self._table(group, stored) if stored else None
        found = {} if table is None else dict(zip(table.column_names, table.columns, strict=True))
        rows, arrow = int(self.sizes[group]), pyarrow(WHAT)
        for name in partitioned & set(names):
            found[name] = arrow.chunked_array([self._partitions.column(name, file, rows)])
        for name in set(names) - found.keys():  # the file is older than a column of its table, or was added to it
            found[name] = arrow.chunked_array([self._partitions.absent(name, file, rows)])
        short = next((name for name in names if len(found[name]) != rows), None)
        if short is not None:
            problem = f"column {short!r} has {len(found[short])} rows, its footer says {rows}"
            raise damage_error(self._describe(group), "Parquet", problem)
        return {name: found[name] for name in names}

    def _table(self, group: int, names: Sequence[str]) -> Any:
        file, number = self.in_file(group)
        spans = [] if self._files.is_local else self._make_plan(group, names).spans
        try:
            with (
                self._files.open_parquet(file, self._footers.metadata(file), spans) as opened,
                naming(self._describe(group)),
            ):
                return _read(opened, number, list(names))
        except FileNotFoundError as error:
            if isinstance(error, StoreError):
                raise
            raise ObjectNotFoundError(
                f"{self._describe(group)} cannot be read: the file has been removed since this dataset was created;"
                " restore it or re-create the dataset"
            ) from error

    def _describe(self, group: int) -> str:
        file, number = self.in_file(group)
        return f"row group {number} of {self._files.names[file]}"

    def _warn_of_large(self, largest: Sequence[int]) -> None:
        """Warn about the first row group whose chosen columns are large."""
        limit = _large_nbytes()
        # The size of the largest row group, with all columns, excludes most files without a read of their footers.
        groups = (
            group
            for file, nbytes in enumerate(largest)
            if nbytes > limit
            for group in self._by_file.positions(file)
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
        file, number = self.in_file(group)
        metadata = self._footers.metadata(file)
        schema, row_group, wanted = (
            metadata.schema,
            metadata.row_group(number),
            set(names) - set(self._partitions.names),
        )
        # Only chosen columns are examined, because others may be encrypted.
        leaves = [leaf for leaf in range(row_group.num_columns) if _is_of(schema.column(leaf).path, wanted)]
        with naming(self._describe(group)):
            chosen = [row_group.column(leaf) for leaf in leaves]
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
    """The type of a sample if older files may lack columns."""
    wanted = list(table.names if columns is None else columns)
    for name in wanted:
        if not column_names([name], table.names):  # even if an older file has it
            raise ArgumentError(
                f"column {name!r} is not in the table of {paths[0]}; there are {', '.join(table.names)}"
            )
    for schema, path in zip(schemas, paths, strict=True):
        table.check(schema, wanted, path)
    young = [name for name in column_names(wanted, table.names) if not any(name in each.names for each in schemas)]
    if young:
        schemas, paths = [*schemas, _schema_of_new_columns(young, table, paths[0])], [*paths, "the schema of the table"]
    known = [present(wanted, schema) for schema in schemas]
    missing = set(wanted).difference(*known)
    if missing:
        kinds_of(schemas[0], [*missing], paths[0])  # raises: no file has the column
    kinds = [
        kinds_of(schema, names, path) if names else StructType(())
        for schema, names, path in zip(schemas, known, paths, strict=True)
    ]
    return merge_columns(kinds, paths, column_names(wanted, table.names))


def _schema_of_new_columns(names: Sequence[str], table: TableColumns, path: str) -> Any:
    """The schema of columns that no file has yet.

    ArgumentError for a column whose type is unknown.
    """
    unknown = [name for name in names if name not in table.types]
    if unknown:
        raise ArgumentError(
            f"column {unknown[0]!r} of the table is in none of its files yet, such as {path}, and its type is not a"
            " plain one; leave it out with columns=[...]"
        )
    return pyarrow(WHAT).schema([(name, table.types[name]) for name in names])


def _read(opened: Any, number: int, names: list[str]) -> Any:
    """Read columns of a row group as a table.

    It has several batches if pyarrow cannot make a single one.
    """
    # Worker processes set torch to one thread, and must not start a thread per core here.
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


def _is_of(path: str, names: set[str]) -> bool:
    """True if a leaf column belongs to one of these columns."""
    return path in names or any(path[:at] in names for at, character in enumerate(path) if character == ".")


def _span(column: Any) -> Range:
    """The byte range of a column chunk, its dictionary included."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    return start, start + column.total_compressed_size
