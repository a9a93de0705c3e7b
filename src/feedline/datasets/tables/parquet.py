"""Random access to rows of Parquet files, with cached row groups."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from feedline.core.dataset import TransformFunction
from feedline.core.dataset_fingerprint import selection_digest
from feedline.core.kernels import Int32s, Int64s
from feedline.core.paths import Pathlike
from feedline.datasets.decoding import Decode
from feedline.datasets.formats import FORMATS, KeptShards, ShardSummary
from feedline.datasets.indexes import metadata_path
from feedline.datasets.paths import Paths, columns_of, paths_of
from feedline.datasets.tables.data_files import data_files, folder_values
from feedline.datasets.tables.decoded import CACHE_NBYTES, DecodedTable
from feedline.datasets.tables.filters import Filters, Partitions
from feedline.datasets.tables.parquet_files import (
    WHAT,
    Decryption,
    FilesystemFiles,
    Footers,
    ParquetFiles,
    StoredFiles,
    check_single_reader,
    naming,
)
from feedline.datasets.tables.row_groups import RowGroups
from feedline.datasets.tables.snapshots import TableColumns
from feedline.datasets.tables.types import pyarrow
from feedline.errors import ArgumentError
from feedline.stores import Cache
from feedline.stores.urls import absolute
from feedline.transforms.batched.encoded import decoded_on_device


class Parquet(DecodedTable[RowGroups]):
    """Rows of Parquet files as dicts by column.

    `paths` is a path or URL, a folder of `.parquet` files, a glob or brace pattern, or a list of these. With
    `filesystem` (of `pyarrow.fs`), paths are paths of that filesystem. Names in a folder that begin with `_` or `.` are
    skipped. `columns` are names of columns or of their members ("image.bytes"); None means all.

    Numbers, booleans, times (the stored integers: days, microseconds, ...) and decimals (as float64) become tensors.
    Lists of numbers become tensors with one more dimension. Texts become `str` or `bytes`, structs dicts, other lists
    lists, and maps lists of dicts with `key` and `value`. A folder named `year=2024` adds a column `year`.

    `nulls` is the policy for nulls: "raise", "nan", a fill value, `[]` for lists, a tuple of alternatives (the first
    that fits is used), or a dict of these by column or member ("image.path").

    `transform` is a function of the sample, or a dict of functions by column. A column of encoded images, or a struct
    of their `bytes`, is decoded in one step with one of feedline's transforms. `decode` names decoders by column:
    "image" (PIL, RGB), "text", "npy", "bytes" or a function of the bytes. `decode="device"` instead wraps image
    transforms in `transforms.DecodeOnDevice`.

    `filters` are as in pyarrow: a list of `(column, operator, value)` tuples, which must all match, or a list of such
    lists, of which at least one must match. Row groups that cannot match, by their folders or statistics, are not read.

    Row groups are the shards. A row group is decoded whole when one of its rows is needed. Each process caches decoded
    row groups within `cache_nbytes`. Any order is fast while the decoded columns fit there; for larger data,
    `samplers.ShardShuffled(dataset.shard_sizes, seed, window)` decodes each row group about once.

    From stores only the chosen columns are read, for all row groups of a batch at once, through `cache` if it is given;
    `options` are passed to `open_store`. Footers of remote files are cached on this machine, in the folder `index_dir`,
    unless they are encrypted: `decryption` is a function that returns pyarrow's `FileDecryptionProperties`, called once
    in each process.

    SampleError names a file that is damaged, and a null or value that the policies refuse.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        filters: Sequence[Any] | None = None,
        nulls: Any = "raise",
        decode: Mapping[str, Decode] | Literal["device"] | None = None,
        transform: TransformFunction | Mapping[str, TransformFunction] | None = None,
        cache_nbytes: int = CACHE_NBYTES,
        decryption: Decryption | None = None,
        filesystem: Any = None,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        pyarrow(WHAT)
        if decode == "device":
            transform, decode = decoded_on_device(transform), None
        check_single_reader(filesystem, cache=cache, options=options)
        given, columns = paths_of(paths), columns_of(columns)
        texts = [os.fspath(path) for path in given]
        files: ParquetFiles
        table: TableColumns | None = None
        if filesystem is None:
            data = data_files(given, FORMATS["parquet"].pattern, cache=cache, options=options)
            files, table = StoredFiles(data.files, decryption), data.table
            partitions = Partitions(data.files.names, data.partitions, data.types)
        else:
            files = FilesystemFiles(filesystem, given, decryption)
            partitions = Partitions(files.names, folder_values(files.names, texts))
        self._filters = None if filters is None else Filters(filters)
        self._matching: Int32s | None = None
        groups = RowGroups(files, _footers(files, texts, index_dir), partitions, columns, self._filters, table)
        super().__init__(groups, nulls=nulls, transform=transform, decode=decode, cache_nbytes=cache_nbytes)

    def _shard_sizes(self) -> Int64s:
        """The number of rows of each row group that match the filters."""
        if self._filters is None:
            return super()._shard_sizes()
        matching, rows, names = self.chunks.rows_where(self._filters), int(self.chunks.sizes.sum()), self.chunks.names
        if rows and not any(map(len, matching)):
            raise ArgumentError(
                f"filters={self._filters.given!r} match none of the {rows} rows of {names[0]}"
                f"{f' and {len(names) - 1} more' * (len(names) > 1)}: check their values"
            )
        self._matching = np.concatenate([np.empty(0, np.int32), *matching])
        return np.array([len(rows) for rows in matching], np.int64)

    @property
    def listing_fingerprint(self) -> str | None:
        """A digest of ordered file names and matching rows."""
        whole = super().listing_fingerprint
        return whole if self._matching is None else selection_digest(whole, self._matching)

    def _places(self, inside: Int64s) -> tuple[Int64s, Int64s]:
        which, rows = super()._places(inside)
        return which, rows if self._matching is None else self._matching[inside].astype(np.int64)


def _footers(files: ParquetFiles, paths: Sequence[str], index_dir: Pathlike | None) -> Footers:
    return Footers(files, metadata_path("parquet-footers", map(absolute, paths), index_dir))


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
    with naming(", ".join(paths)):
        stored = [sum(group.column(at).total_compressed_size for at in range(group.num_columns)) for group in groups]
    kept = KeptShards(CACHE_NBYTES, [group.total_byte_size for group in groups])
    return ShardSummary("row group", [group.num_rows for group in groups], stored, kept)
