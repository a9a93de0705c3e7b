"""Rows of chunks that are made when they are needed, and kept while memory lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np

from feedline import collate
from feedline.datasets.chunks import StructChunk
from feedline.datasets.kinds import Struct
from feedline.datasets.nulls import Nulls
from feedline.datasets.once import OnceCache
from feedline.datasets.spans import Int64s
from feedline.datasets.tables import ChunkRows, naming_unlike
from feedline.per_process import PerProcess
from feedline.rows import Empty

CACHE_NBYTES = 1 << 29


class Chunks(Protocol):
    """What makes chunks by number."""

    kind: Struct

    def decoded(self, number: int) -> StructChunk:
        """A chunk, made now."""
        ...

    def each(
        self, work: Callable[[int], StructChunk], numbers: Sequence[int], limit_nbytes: int
    ) -> Iterator[StructChunk]:
        """`work` of each number, in order; several at once, within this memory, where that is faster."""
        ...

    def locate(self, number: int, row: int) -> str:
        """What a row of a chunk is called."""
        ...


class KeptChunks:
    """Rows of `chunks`; those of a batch are made first, as many at a time as fit into `cache_nbytes`."""

    def __init__(self, chunks: Chunks, nulls: Nulls, cache_nbytes: int) -> None:
        self._chunks, self._nulls, self._cache_nbytes = chunks, nulls, cache_nbytes
        self._cache: PerProcess[OnceCache[int, StructChunk]] = PerProcess(partial(OnceCache, cache_nbytes))

    @property
    def decoded(self) -> OnceCache[int, StructChunk]:
        """The chunks of this process, by number."""
        return self._cache()

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        """A dict for each row; `which` says in which chunk it lies."""
        samples: list[Any] = [None] * len(rows)
        for places, chunk_rows, local in self._runs(which):
            found = chunk_rows.samples(local, rows[places])
            for place, sample in zip(places.tolist(), found, strict=True):
                samples[place] = sample
        return samples

    def batch(self, which: Int64s, rows: Int64s, empty: Empty) -> Any:
        """What default-collating the samples gives, tensors in memory from `empty`."""
        samples: list[Any] = [None] * len(rows)
        for places, chunk_rows, local in self._runs(which):
            if len(places) == len(rows):
                return chunk_rows.batch(local, rows, empty)
            found = chunk_rows.samples(local, rows[places])
            for place, sample in zip(places.tolist(), found, strict=True):
                samples[place] = sample

        def locate(at: int) -> str:
            return self._chunks.locate(int(which[at]), int(rows[at]))

        with naming_unlike(lambda: samples, locate):
            return collate.default(samples, empty=empty)

    def _runs(self, which: Int64s) -> Iterator[tuple[Int64s, ChunkRows, Int64s]]:
        """Which rows can be taken now, from what, and the chunk of each therein: as many chunks at a time as fit.

        Those that are kept come first, lest they make room for others and be made again.
        """
        decoded, touched = self.decoded, np.unique(which).tolist()
        kept, lacking = [n for n in touched if n in decoded], [n for n in touched if n not in decoded]
        chunks = chain(map(self._chunk, kept), self._chunks.each(self._chunk, lacking, self._cache_nbytes))
        held: dict[int, StructChunk] = {}
        for count, (number, chunk) in enumerate(zip([*kept, *lacking], chunks, strict=True), start=1):
            held[number] = chunk
            if count == len(touched) or sum(each.nbytes for each in held.values()) >= self._cache_nbytes:
                yield self._run(which, held)
                held = {}

    def _chunk(self, number: int) -> StructChunk:
        return self.decoded.get(number, partial(self._chunks.decoded, number))

    def _run(self, which: Int64s, held: dict[int, StructChunk]) -> tuple[Int64s, ChunkRows, Int64s]:
        numbers = np.array(sorted(held), np.int64)
        places = np.flatnonzero(np.isin(which, numbers))
        locate = partial(self._locate, numbers.tolist())
        rows = ChunkRows(self._chunks.kind, [held[number] for number in numbers.tolist()], self._nulls, locate)
        return places, rows, np.searchsorted(numbers, which[places])

    def _locate(self, numbers: Sequence[int], chunk: int, row: int) -> str:
        return self._chunks.locate(numbers[chunk], row)
