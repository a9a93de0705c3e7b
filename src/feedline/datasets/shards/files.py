"""Shards that the index of a folder promises, read in ranges: many ranges of many shards at once.

Which file or object each shard of an index lies in, and how all of it is had: mapped, or fetched and inflated.

Beginnings and ends of shards in stores, which say where their records lie: read once, kept on this machine.
"""

from __future__ import annotations

import logging
import mmap
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import PerProcess
from feedline.core.paths import make_folder, user_cache
from feedline.core.tensors import within
from feedline.core.threads import DaemonPool
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.base import ShardedFields
from feedline.datasets.indexes import MetadataCache, key_of, place_of, stamp
from feedline.datasets.shards.compression import InflatedFiles, inflated, refuse_other
from feedline.datasets.shards.folder import Found, IndexedFolder
from feedline.errors import SampleError
from feedline.stores import Cache, CachedStore, CacheWarning, ObjectInfo, ObjectNotFoundError, ObjectRange, Store, join
from feedline.stores.cache import without_cache
from feedline.stores.files import Extent, FileSet, LazyList


class ShardSource(NamedTuple):
    """A shard: the files that it may lie in, best first, with the codec of each, and what its index promises."""

    forms: Mapping[str, str | None]
    nbytes: int
    samples: int
    hashes: Mapping[str, str]


class ShardSources:
    """Shards by number, in one or more folders. Safe to use from several threads; pickles by path or address.

    What was compressed as a whole is kept decompressed in the folder `cache`; `extra` is the one that decompressing
    takes.
    """

    def __init__(
        self, shards: Sequence[tuple[IndexedFolder, ShardSource]], extra: str, cache: Cache | Pathlike | None
    ) -> None:
        self.shards = [shard for _, shard in shards]
        self._folders, self._extra, self._own = [folder for folder, _ in shards], extra, uuid4().hex
        self._found = _found(self._folders, self.shards)
        self.blobs = FileSet([*map(_blob, self._folders, self._found)])
        """All shards by their numbers; only objects are read through it."""
        self._inflated = InflatedFiles(cache if isinstance(cache, Cache) else Cache(_folder(cache)))

    def where(self, number: int) -> str:
        """The path or address of a shard, as people are told."""
        return self._folders[number].where(self._found[number].name)

    def ranged(self, number: int) -> bool:
        """Whether a shard is an object of which ranges can be read."""
        return self._found[number].info is not None and self._codec(number) is None

    def object(self, number: int) -> tuple[Store, ObjectInfo]:
        """An object of which ranges can be read; SampleError if it is not as long as its index promises."""
        store, info = self._folders[number].store, self._found[number].info
        assert store is not None
        assert info is not None
        self._refuse_size(number, info.size)
        return store, info

    def whole(self, number: int) -> memoryview:
        """All that is in a shard that is no such object, mapped."""
        codec = self._codec(number)
        if codec is None:
            data = _mapped(self.where(number))
            self._refuse_size(number, len(data))
            return data
        info = self._found[number].info
        version = self._version(info) if info is not None else "-".join(map(str, stamp(self.where(number))))
        return self._inflated.data(self.where(number), version, partial(self._inflate, number, codec))

    def whole_ranges(self, number: int) -> list[tuple[CachedStore, ObjectRange]] | None:
        """What a prefetch has to bring into a cache for `whole`, if that fetches anything at all; else None."""
        info = self._found[number].info
        if info is None or self.ranged(number) or self._inflated.has(self.where(number), self._version(info)):
            return None
        return self.blobs.ranges([Extent(number, 0, info.size)])

    def _version(self, info: ObjectInfo) -> str:
        """Under which an object is kept decompressed: for this dataset only where its store tells no versions."""
        return info.version if info.is_versioned else f"{info.version} {self._own}"

    def has_room(self) -> bool:
        """Whether all that has to be decompressed can be kept; a warning says if not."""
        packed = [shard.nbytes for number, shard in enumerate(self.shards) if self._codec(number) is not None]
        if not packed:
            return True
        cache = self._inflated.cache
        make_folder(cache.folder, f"cache={cache.folder!r}")
        limit = cache.limit_nbytes()
        if sum(packed) > limit:
            warnings.warn(
                f"decompressed, the shards of {self._folders[0].name} take {sum(packed):,} bytes, and the cache in"
                f" {cache.folder} keeps {limit:,}: in random order they are decompressed again and again. Give cache="
                " stores.Cache(folder, limit=...) with more room, or take samplers.ShardShuffled",
                CacheWarning,
                stacklevel=5,
            )
        return sum(packed) <= limit

    def _codec(self, number: int) -> str | None:
        return self.shards[number].forms[self._found[number].name]

    def _inflate(self, number: int, codec: str) -> NDArray[np.uint8]:
        info, shard, where = self._found[number].info, self.shards[number], self.where(number)
        packed = _mapped(where) if info is None else self.blobs.read([Extent(number, 0, info.size)])[0]
        data = inflated(np.frombuffer(packed, np.uint8), codec, shard.nbytes, where, self._extra)
        refuse_other(data, shard.hashes, where)
        return data

    def _refuse_size(self, number: int, found: int) -> None:
        promised = self.shards[number].nbytes
        if found != promised:
            raise SampleError(f"{self.where(number)} has {found} bytes, its index promises {promised}; copy it again")


def _found(folders: Sequence[IndexedFolder], shards: Sequence[ShardSource]) -> list[Found]:
    """Which file each shard lies in; those of one folder are looked for together."""
    found: dict[int, Found] = {}
    for folder in dict.fromkeys(folders):
        mine = [number for number, each in enumerate(folders) if each is folder]
        found |= zip(mine, folder.files([tuple(shards[number].forms) for number in mine]), strict=True)
    return [found[number] for number in range(len(shards))]


def _blob(folder: IndexedFolder, found: Found) -> tuple[Store | None, ObjectInfo]:
    return (None, ObjectInfo(found.name, 0, "")) if found.info is None else (folder.store, found.info)


def _folder(cache: Pathlike | None) -> Path:
    return Path(user_cache("inflated")) if cache is None else Path(cache)


def _mapped(path: str) -> memoryview:
    with open(path, "rb", buffering=0) as file:
        empty = not os.fstat(file.fileno()).st_size
        return memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


_log = logging.getLogger("feedline")


_LENGTH_NBYTES = 8


Read = Callable[[int, int], memoryview]


Cut = Callable[[Read, int, int], tuple[memoryview, memoryview]]
"""From `read(start, stop)`, and the bytes and samples of a shard, to its ends; it does not fail, whatever it reads."""


class Ends(NamedTuple):
    """What has to be known of a shard to find its records: its beginning and its end, as much as its format needs."""

    begin: NDArray[np.uint8]
    end: NDArray[np.uint8]


class ObjectEnds:
    """The ends of objects by number, learned all at once where they are not known. Pickles with what opens the stores.

    `samples` are those of each object. What is read here does not go through the cache of a store, which would fetch a
    large piece for each.
    """

    def __init__(self, objects: Mapping[int, tuple[Store, ObjectInfo]], samples: Mapping[int, int], cut: Cut) -> None:
        self._objects = {number: (without_cache(store), info) for number, (store, info) in objects.items()}
        self._samples, self._cut = samples, cut
        self._known = MetadataCache(place_of("ends", sorted({store.url for store, _ in self._objects.values()}), None))
        keys = map(self._key, self._objects)
        if any(key is not None and self._known.get(key) is None for key in keys):
            self._learn()

    def __getitem__(self, number: int) -> Ends:
        known = self._known.get(self._key(number))
        data = np.frombuffer(self._read(number) if known is None else known, np.uint8)
        stop = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES].tobytes(), "little")
        return Ends(data[_LENGTH_NBYTES:stop], data[stop:])

    def _learn(self) -> None:
        (store, _), *_ = self._objects.values()
        _log.info("reading where the records of %d shards of %s begin; it is kept", len(self._objects), store.url)
        keys = {number: key for number in self._objects if (key := self._key(number)) is not None}
        with DaemonPool(thread_name_prefix="feedline-ends") as pool:
            self._known.replace(dict(zip(keys.values(), pool.map(self._either, keys), strict=True)))

    def _either(self, number: int) -> bytes | memoryview:
        known = self._known.get(self._key(number))
        return self._read(number) if known is None else known

    def _read(self, number: int) -> bytes:
        store, info = self._objects[number]
        begin, end = self._cut(partial(_range, store, info), info.size, self._samples[number])
        return b"".join([len(begin).to_bytes(_LENGTH_NBYTES, "little"), begin, end])

    def _key(self, number: int) -> bytes | None:
        store, info = self._objects[number]
        return key_of(f"{join(store.url, info.path)}\0{self._samples[number]}", info)


def _range(store: Store, info: ObjectInfo, start: int, stop: int) -> memoryview:
    return store.read_many(info.path, [(start, stop)], version=info.version)[0]


def offsets_in(begin: NDArray[np.uint8], samples: int, nbytes: int, where: str) -> memoryview:
    """The offsets of samples, and where the last one ends, that MDS and LitData write behind their number.

    Checked, because a wrong one would read something else: SampleError.
    """
    first = 4 * (samples + 2)
    offsets = (
        begin[4:first].view("<u4").astype(np.uint32, copy=False) if len(begin) >= first else np.empty(0, np.uint32)
    )
    if not (
        len(offsets)
        and int.from_bytes(begin[:4].tobytes(), "little") == samples
        and offsets[0] >= first
        and offsets[-1] == nbytes
        and (offsets[1:] >= offsets[:-1]).all()
    ):
        raise SampleError(f"{where} is damaged: it does not hold {samples} samples, as its index says; copy it again")
    return offsets.data


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
        shards: Sequence[tuple[IndexedFolder, ShardSource]],
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
        self._whole = LazyList(making, len(shards), None if sources.has_room() else _KEPT_WITHOUT_ROOM)
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

    def ranges(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, ObjectRange]]:
        """What a prefetch has to bring into which cache for `read(extents)` to find it there."""
        return self._sources.blobs.ranges([each for each in extents if self._sources.ranged(each.blob)])

    def whole_ranges(self, number: int) -> list[tuple[CachedStore, ObjectRange]] | None:
        """As `wants`, of an object that has to be decompressed before anything of it can be told; None of others."""
        return self._sources.whole_ranges(number)

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

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """What reading these samples will want from which cache."""
        if self._files.is_local:
            return []
        found = [self._at(at) for at in within(indices, len(self), type(self).__name__).tolist()]
        whole = {shard: self._files.whole_ranges(shard) for shard in {shard for shard, _ in found}}
        extents = [Extent(shard, *self._span(shard, row)) for shard, row in found if whole[shard] is None]
        return [*(each for ranges in whole.values() for each in ranges or ()), *self._files.ranges(extents)]
