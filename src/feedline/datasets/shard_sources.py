"""Which file or object each shard of an index lies in, and how all of it is had: mapped, or fetched and inflated."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.files import Pathlike
from feedline.datasets.indexed_folders import Found, IndexedFolder
from feedline.datasets.inflating import InflatedFiles, inflated, refuse_other
from feedline.datasets.sidecars import stamp
from feedline.errors import SampleError
from feedline.stores import Cache, CachedStore, CacheWarning, ObjectInfo, Store, Want
from feedline.stores.blobs import Blobs, Extent
from feedline.stores.whereabouts import made
from feedline.user_cache import user_cache


class Shard(NamedTuple):
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
        self, shards: Sequence[tuple[IndexedFolder, Shard]], extra: str, cache: Cache | Pathlike | None
    ) -> None:
        self.shards = [shard for _, shard in shards]
        self._folders, self._extra, self._own = [folder for folder, _ in shards], extra, uuid4().hex
        self._found = _found(self._folders, self.shards)
        self.blobs = Blobs([*map(_blob, self._folders, self._found)])
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

    def wants_whole(self, number: int) -> list[tuple[CachedStore, Want]] | None:
        """What a prefetch has to bring into a cache for `whole`, if that fetches anything at all; else None."""
        info = self._found[number].info
        if info is None or self.ranged(number) or self._inflated.has(self.where(number), self._version(info)):
            return None
        return self.blobs.wants([Extent(number, 0, info.size)])

    def _version(self, info: ObjectInfo) -> str:
        """Under which an object is kept decompressed: for this dataset only where its store tells no versions."""
        return info.version if info.is_versioned else f"{info.version} {self._own}"

    def has_room(self) -> bool:
        """Whether all that has to be decompressed can be kept; a warning says if not."""
        packed = [shard.nbytes for number, shard in enumerate(self.shards) if self._codec(number) is not None]
        if not packed:
            return True
        cache = self._inflated.cache
        made(cache.folder, f"cache={cache.folder!r}")
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


def _found(folders: Sequence[IndexedFolder], shards: Sequence[Shard]) -> list[Found]:
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
