"""`Parquet`: rows of Parquet files by number, row groups decoded once and kept while memory lasts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.arrays import Transform
from feedline.datasets.chunks import StructChunk
from feedline.datasets.data_files import columns_of, data_files, paths_of
from feedline.datasets.descriptions import place_of
from feedline.datasets.files import Pathlike
from feedline.datasets.hive import Partitions
from feedline.datasets.kept_chunks import CACHE_NBYTES, KeptChunks
from feedline.datasets.kinds import pyarrow
from feedline.datasets.nulls import Nulls
from feedline.datasets.once import OnceCache
from feedline.datasets.parquet_files import WHAT, Files, FilesystemFiles, StoredFiles, refuse_two_readers
from feedline.datasets.parquet_footers import Footers
from feedline.datasets.paths import Paths
from feedline.datasets.row_filters import Filters
from feedline.datasets.row_groups import RowGroups
from feedline.datasets.spans import Int64s
from feedline.datasets.tables import TableDataset
from feedline.errors import ArgumentError
from feedline.listings import digest_of
from feedline.rows import Empty, within
from feedline.stores import Cache, CachedStore, Want
from feedline.stores.addresses import absolute


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
    if it is given; `options` are those of `open_store`. Their footers are kept on this machine, in the folder `index`.
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
        index: Pathlike | None = None,
    ) -> None:
        pyarrow(WHAT)
        refuse_two_readers(filesystem, cache=cache, options=options)
        asked, columns = paths_of(paths), columns_of(columns)
        given = [os.fspath(path) for path in asked]
        files: Files
        if filesystem is None:
            files = StoredFiles(data_files(asked, "**/*.parquet", cache=cache, options=options))
        else:
            files = FilesystemFiles(filesystem, asked)
        wanted = None if filters is None else Filters(filters)
        footers = Footers(files, place_of("parquet-footers", map(absolute, given), index))
        self._groups = RowGroups(files, footers, Partitions(files.names, given), columns, wanted)
        self.kind = self._groups.kind
        checked = Nulls(nulls)
        checked.check(self.kind)
        self._names = files.names
        self._kept = KeptChunks(self._groups, checked, cache_nbytes)
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
    def decoded(self) -> OnceCache[int, StructChunk]:
        """The decoded row groups of this process, by number: their bytes, and how many were decoded so far."""
        return self._kept.decoded

    @property
    def listing_digest(self) -> str:
        """Of the names of the files in their order, and the rows of each row group, for a loader's state."""
        return digest_of(self._names, self.shard_sizes)

    def wants(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        """What reading these samples will want from which cache, so that a loader can fetch it before."""
        which, _ = self._places(within(indices, len(self), type(self).__name__))
        return self._groups.wants(np.unique(which).tolist())

    def _places(self, inside: Int64s) -> tuple[Int64s, Int64s]:
        which, rows = super()._places(inside)
        return which, rows if self._chosen is None else self._chosen[inside].astype(np.int64)

    def _samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        return self._kept.samples(which, rows)

    def _batch(self, which: Int64s, rows: Int64s, empty: Empty) -> Any:
        return self._kept.batch(which, rows, empty)
