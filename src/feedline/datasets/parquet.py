"""`Parquet`: rows of Parquet files by number, row groups decoded once and kept while memory lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline import collate
from feedline.datasets.arrays import Transform
from feedline.datasets.chunks import StructChunk
from feedline.datasets.columns import Nulls
from feedline.datasets.once import OnceCache
from feedline.datasets.paths import Paths
from feedline.datasets.row_groups import RowGroups
from feedline.datasets.spans import Int64s
from feedline.datasets.tables import ChunkRows, TableDataset
from feedline.per_process import PerProcess
from feedline.rows import Empty

CACHE_NBYTES = 1 << 29


class Parquet(TableDataset):
    """Rows of Parquet files as samples: dicts by column, with the dtypes that are stored.

    `paths` is a path, a folder of `.parquet` files, a glob or brace pattern, or a list of them; with `filesystem` (of
    `pyarrow.fs`), paths within it. Numbers, booleans, times (the integers stored: days, microseconds, ...) and
    decimals (as float64) become tensors; lists of numbers tensors of one dimension more; texts `str` and `bytes`;
    structs dicts; other lists stay lists. `nulls` says what stands for missing values: "raise", "nan", a value, or a
    dict of these by column. `filters` are pyarrow's `[("year", ">", 2020), ...]`, all of which must hold, or a list of
    such lists, one of which must.

    Row groups are the shards. One is decoded whole when a row of it is needed; decoded ones are kept, per process,
    within `cache_nbytes`. So any order is fast while the decoded columns fit there; for larger data
    `samplers.ShardShuffled(dataset.shard_sizes, seed, window)` decodes each row group about once.
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
    ) -> None:
        self._groups = RowGroups(paths, columns, filesystem)
        self.kind = self._groups.kind
        self._nulls = Nulls(nulls)
        self._nulls.check(self.kind)
        self._cache_nbytes = cache_nbytes
        self._chosen: NDArray[np.int32] | None = None
        sizes = self._groups.sizes
        if filters is not None:
            chosen = [self._groups.rows_where(group, filters) for group in range(len(sizes))]
            sizes = np.array([len(rows) for rows in chosen], np.int64)
            self._chosen = np.concatenate([np.empty(0, np.int32), *chosen])
        super().__init__(sizes, transform)
        self._cache: PerProcess[OnceCache[int, StructChunk]] = PerProcess(partial(OnceCache, cache_nbytes))

    @property
    def decoded(self) -> OnceCache[int, StructChunk]:
        """The decoded row groups of this process, by number: their bytes, and how many were decoded so far."""
        return self._cache()

    def _places(self, inside: Int64s) -> tuple[Int64s, Int64s]:
        which, rows = super()._places(inside)
        return which, rows if self._chosen is None else self._chosen[inside].astype(np.int64)

    def _samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        samples: list[Any] = [None] * len(rows)
        for places, chunk_rows, local in self._runs(which):
            found = chunk_rows.samples(local, rows[places])
            for place, sample in zip(places.tolist(), found, strict=True):
                samples[place] = sample
        return samples

    def _batch(self, which: Int64s, rows: Int64s, empty: Empty) -> Any:
        samples: list[Any] = [None] * len(rows)
        for places, chunk_rows, local in self._runs(which):
            if len(places) == len(rows):
                return chunk_rows.batch(local, rows, empty)
            found = chunk_rows.samples(local, rows[places])
            for place, sample in zip(places.tolist(), found, strict=True):
                samples[place] = sample
        return collate.default(samples, empty=empty)

    def _runs(self, which: Int64s) -> Iterator[tuple[Int64s, ChunkRows, Int64s]]:
        """Which rows can be taken now, from what, and the chunk of each therein: as many row groups at a time as fit.

        Those that are kept come first, lest they make room for others and be decoded again.
        """
        decoded, touched = self.decoded, np.unique(which).tolist()
        held: dict[int, StructChunk] = {}
        for number, group in enumerate(sorted(touched, key=lambda group: group not in decoded), start=1):
            held[group] = decoded.get(group, partial(self._groups.decoded, group))
            if number == len(touched) or sum(chunk.nbytes for chunk in held.values()) >= self._cache_nbytes:
                yield self._run(which, held)
                held = {}

    def _run(self, which: Int64s, held: dict[int, StructChunk]) -> tuple[Int64s, ChunkRows, Int64s]:
        groups = np.array(sorted(held), np.int64)
        places = np.flatnonzero(np.isin(which, groups))
        locate = partial(self._locate, groups.tolist())
        rows = ChunkRows(self.kind, [held[group] for group in groups.tolist()], self._nulls, locate)
        return places, rows, np.searchsorted(groups, which[places])

    def _locate(self, groups: Sequence[int], chunk: int, row: int) -> str:
        return self._groups.locate(groups[chunk], row)
