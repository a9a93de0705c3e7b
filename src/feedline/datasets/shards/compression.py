"""Compressed shards: decompressed once into a folder of the machine, within the size that was promised, and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.caches import PerProcess
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache, StoreError
from feedline.stores.cache.entries import Key
from feedline.stores.cache.folder import Folder

_CODECS = {"br": "brotli", "bz2": "bzip2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}


_WAITED_S = 60.0


ORDINARY_NBYTES = 1 << 30
"""So much may come out of anything."""


_ORDINARY_RATIO = 100


_XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")


def inflated(data: Any, codec: str, nbytes: int, where: str, extra: str) -> NDArray[np.uint8]:
    """The `nbytes` bytes that were compressed with `codec`; SampleError for fewer, more, or damaged ones."""
    if codec not in _CODECS:
        raise ArgumentError(f"{where} is compressed with {codec!r}; known are {', '.join(_CODECS)}")
    if is_bomb(nbytes, len(data)):
        raise SampleError(
            f"{where} has {len(data):,} bytes, of which {nbytes:,} are promised to come, as of a decompression bomb;"
            " copy it again, with its index"
        )
    cramjam = optional.load("cramjam", extra, f"reading {codec}-compressed shards")
    module = getattr(cramjam, _CODECS[codec])
    out = np.empty(nbytes, np.uint8)
    try:
        count = (module.decompress_raw_into if codec == "snappy" else module.decompress_into)(data, out)
    except cramjam.DecompressionError as error:
        raise SampleError(f"{where} cannot be decompressed to {nbytes} bytes ({error}); copy it again") from error
    if count != nbytes:
        raise SampleError(f"{where} holds {count} bytes where its index promises {nbytes}; copy it again")
    return out


def is_bomb(nbytes: int, packed: int) -> bool:
    """Whether so many bytes are too many to come out of so few `packed` ones."""
    return nbytes > max(ORDINARY_NBYTES, _ORDINARY_RATIO * packed)


class InflatedFiles:
    """What compressed files and objects hold, each decompressed once for all processes of the machine.

    It is kept in a cache, under the address and version of what was compressed, and checked when it is opened.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        # The fewer of them a folder keeps mapped, the better: they are as large as shards.
        self._folder = PerProcess(partial(Folder, replace(cache, piece_nbytes=1 << 30)))

    def has(self, name: str, version: str) -> bool:
        """Whether it need not be decompressed."""
        return self._folder().has(_key(name, version))

    def data(self, name: str, version: str, make: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """What `make()` gives, mapped: it is called by one process for all, if it must be called at all."""
        key, folder = _key(name, version), self._folder()
        while (found := folder.get(key)) is None:
            with folder.claims() as claims:
                if claims.take(key.name()):
                    found = folder.get(key)  # made by another since the first look
                    return self._made(name, key, make()) if found is None else found
            claims.wait(key.name(), _WAITED_S)
        return found

    def _made(self, name: str, key: Key, data: NDArray[np.uint8]) -> memoryview:
        folder, view = self._folder(), data.data
        try:
            folder.put_file(key, view.nbytes, lambda write_at: write_at(0, view))
        except OSError as error:
            raise StoreError(
                f"{name} makes {view.nbytes:,} bytes when it is decompressed, which cannot be kept in"
                f" {self.cache.folder} ({error.strerror or 'the limit of the cache is lower'}): give cache= a folder"
                " with more room"
            ) from error
        kept = folder.get(key)
        return view.toreadonly() if kept is None else kept  # evicted at once


def refuse_other(data: NDArray[np.uint8], hashes: Mapping[str, str], where: str) -> None:
    """SampleError if the data have not these hashes, hex digests by the name of the algorithm."""
    for name, wanted in hashes.items():
        found = _digest(name, data, where)
        if found != wanted:
            raise SampleError(f"{where} is damaged: its {name} is {found}, its index promises {wanted}; copy it again")


def _digest(name: str, data: NDArray[np.uint8], where: str) -> str:
    if name in hashlib.algorithms_guaranteed and not name.startswith("shake"):
        return hashlib.new(name, data.data, usedforsecurity=False).hexdigest()
    if name not in _XXHASHES:
        raise ArgumentError(f"{where} has hashes of the kind {name!r}, which is not known; give check_hashes=False")
    digest: str = getattr(optional.load("xxhash", "mds", f"checking {name} hashes"), name)(data).hexdigest()
    return digest


def _key(name: str, version: str) -> Key:
    return Key(name, f"{version} decompressed", 0, 0)
