"""Shards that the index of a folder promises, read in ranges: many ranges of many shards at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feedline.cancelling import DaemonPool
from feedline.datasets.files import Pathlike
from feedline.datasets.indexed_folders import IndexedFolder
from feedline.datasets.inflating import refuse_other
from feedline.datasets.lazily import Lazily
from feedline.datasets.shard_ends import Cut, Ends, ObjectEnds, Read
from feedline.datasets.shard_sources import Shard, ShardSources
from feedline.datasets.sharded_records import ShardedFields
from feedline.per_process import PerProcess
from feedline.rows import within
from feedline.stores import Cache, CachedStore, ObjectNotFoundError, Want
from feedline.stores.blobs import Extent

_OPENED_AT_ONCE = 4
"""Of each that is decompressed, what was compressed and what it makes are in memory."""

_KEPT_WITHOUT_ROOM = 8
"""Of shards that the cache cannot keep, so many stay mapped, and hence on the disk."""


class ShardFiles:
    """Shards by number. Safe to use from several threads; pickles by path or address.

    `cut` says what the ends of a shard are, if any of that has to be known, and `sizes` how many samples of a dataset
    come of each, if not those that lie in it; the rest as for `ShardSources`. A file that is not there is an
    ObjectNotFoundError, here if its folder does not list it.
    """

    def __init__(
        self,
        shards: Sequence[tuple[IndexedFolder, Shard]],
        cut: Cut | None,
        extra: str,
        cache: Cache | Pathlike | None,
        *,
        sizes: Sequence[int] | None = None,
    ) -> None:
        sources = self._sources = ShardSources(shards, extra, cache)
        self.shards, self._cut = sources.shards, cut or _nothing
        making = partial(_whole, sources, sizes)
        _refuse_missing(sources, sizes, [folder.store is None for folder, _ in shards])
        self._whole = Lazily(making, len(shards), None if sources.has_room() else _KEPT_WITHOUT_ROOM)
        self._openers = PerProcess(partial(DaemonPool, _OPENED_AT_ONCE, "feedline-shards"))
        objects = {number: sources.object(number) for number in range(len(shards)) if sources.ranged(number)}
        samples = {number: self.shards[number].samples for number in objects}
        self._ends = ObjectEnds(objects if cut else {}, samples, self._cut)

    @property
    def is_local(self) -> bool:
        """Whether all of them are files of this machine."""
        return self._sources.blobs.is_local

    def where(self, number: int) -> str:
        """The path or address of a shard, as people are told."""
        return self._sources.where(number)

    def data(self, number: int) -> memoryview | None:
        """All that is in a shard, mapped; None for an object of which ranges are read."""
        return None if self._sources.ranged(number) else self._whole[number]

    def ends(self, number: int) -> Ends:
        """The ends of a shard."""
        data = self.data(number)
        if data is None:
            return self._ends[number]
        shard = self.shards[number]
        begin, end = self._cut(lambda start, stop: data[start:stop], shard.nbytes, shard.samples)
        return Ends(np.frombuffer(begin, np.uint8), np.frombuffer(end, np.uint8))

    def check(self) -> None:
        """SampleError for the first shard that has not the hashes of its index."""
        for number, shard in enumerate(self.shards):
            (data,) = self.read([Extent(number, 0, shard.nbytes)])
            refuse_other(np.frombuffer(data, np.uint8), shard.hashes, self.where(number))

    def read(self, extents: Sequence[Extent]) -> list[memoryview]:
        """One view for each, all at once; places are those in the shard as it was before it was compressed."""
        whole, blobs = self._whole, self._sources.blobs
        if blobs.is_local:
            return [whole[number][start:stop] for number, start, stop in extents]
        ranged = [each for each in extents if self._sources.ranged(each.blob)]
        objects = iter(blobs.read(ranged))
        others = self._opened({each.blob for each in extents} - {each.blob for each in ranged})
        return [others[number][start:stop] if number in others else next(objects) for number, start, stop in extents]

    def wants(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, Want]]:
        """What a prefetch has to bring into which cache for `read(extents)` to find it there."""
        return self._sources.blobs.wants([each for each in extents if self._sources.ranged(each.blob)])

    def wants_whole(self, number: int) -> list[tuple[CachedStore, Want]] | None:
        """As `wants`, of an object that has to be decompressed before anything of it can be told; None of others."""
        return self._sources.wants_whole(number)

    def _opened(self, numbers: Collection[int]) -> dict[int, memoryview]:
        """What these shards hold; several are fetched and decompressed at once."""
        if len(numbers) < 2:
            return {number: self._whole[number] for number in numbers}
        return dict(zip(numbers, self._openers().map(self._whole.__getitem__, numbers), strict=True))


def _whole(sources: ShardSources, sizes: Sequence[int] | None, number: int) -> memoryview:
    """All that is in a shard, mapped."""
    try:
        return sources.whole(number)
    except FileNotFoundError as error:
        raise _missing(sources, sizes, number) from error


def _refuse_missing(sources: ShardSources, sizes: Sequence[int] | None, local: Sequence[bool]) -> None:
    """ObjectNotFoundError names the first file of this machine that its folder does not list."""
    listed: dict[Path, set[str]] = {}
    for number in compress(range(len(local)), local):
        path = Path(sources.where(number))
        if path.parent not in listed:
            there = path.parent.iterdir() if path.parent.is_dir() else ()
            listed[path.parent] = {each.name for each in there}
        if path.name not in listed[path.parent]:
            raise _missing(sources, sizes, number)


def _missing(sources: ShardSources, sizes: Sequence[int] | None, number: int) -> ObjectNotFoundError:
    counts = [shard.samples for shard in sources.shards] if sizes is None else sizes
    return ObjectNotFoundError(
        f"{sources.where(number)} does not exist, which index.json names for {counts[number]} samples from number"
        f" {sum(counts[:number])} on: copy it there, or write the data set again"
    )


def _nothing(read: Read, nbytes: int, samples: int) -> tuple[memoryview, memoryview]:  # noqa: ARG001 - a `Cut`
    return memoryview(b""), memoryview(b"")


class ShardFileFields(ShardedFields):
    """Records of `ShardFiles` that consist of fields."""

    def __init__(self, files: ShardFiles) -> None:
        super().__init__((shard.samples for shard in files.shards), files)
        self._files = files

    def wants(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        """What reading these samples will want from which cache."""
        if self._files.is_local:
            return []
        found = [self._at(at) for at in within(indices, len(self), type(self).__name__).tolist()]
        whole = {shard: self._files.wants_whole(shard) for shard in {shard for shard, _ in found}}
        extents = [Extent(shard, *self._span(shard, row)) for shard, row in found if whole[shard] is None]
        return [*(want for wants in whole.values() for want in wants or ()), *self._files.wants(extents)]
