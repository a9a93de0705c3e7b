"""Decompression of whole shards, once per machine, into a cache folder.

The decompressed size is bounded by the size in the index, and checked against it, as are hashes.
"""

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


_CLAIM_WAIT_S = 60.0


ORDINARY_NBYTES = 1 << 30
"""Sizes up to this are never taken for a decompression bomb."""


_ORDINARY_RATIO = 100


_XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")


def inflate(data: Any, codec: str, nbytes: int, where: str, extra: str) -> NDArray[np.uint8]:
    """Decompress `data` to exactly `nbytes` bytes.

    SampleError for damaged data and any other size, ArgumentError for an unknown codec. Errors call the data `where`.
    """
    if codec not in _CODECS:
        raise ArgumentError(f"{where} is compressed with {codec!r}; supported codecs are {', '.join(_CODECS)}")
    if is_bomb(nbytes, len(data)):
        raise SampleError(
            f"{where} has {len(data):,} bytes, and its index claims that they decompress to {nbytes:,}, which suggests"
            " a decompression bomb; copy it again, with its index"
        )
    cramjam = optional.load("cramjam", extra, f"reading {codec}-compressed shards")
    module = getattr(cramjam, _CODECS[codec])
    out = np.empty(nbytes, np.uint8)
    try:
        count = (module.decompress_raw_into if codec == "snappy" else module.decompress_into)(data, out)
    except cramjam.DecompressionError as error:
        raise SampleError(f"{where} cannot be decompressed to {nbytes} bytes ({error}); copy it again") from error
    if count != nbytes:
        raise SampleError(f"{where} decompresses to {count} bytes, its index says {nbytes}; copy it again")
    return out


def is_bomb(nbytes: int, packed: int) -> bool:
    """True if `nbytes` is implausibly large for `packed` compressed bytes."""
    return nbytes > largest_nbytes(packed)


def largest_nbytes(packed: int) -> int:
    """Largest plausible size of the content of `packed` compressed bytes."""
    return max(ORDINARY_NBYTES, _ORDINARY_RATIO * packed)


class InflatedFiles:
    """Decompressed files and objects, shared by all processes of the machine.

    Each is decompressed once and kept in a cache, keyed by the address and version of the compressed file.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        # Decompressed shards are large, so few should stay mapped: pieces larger than most shards.
        self._folder = PerProcess(partial(Folder, replace(cache, piece_nbytes=1 << 30)))

    def has(self, name: str, version: str) -> bool:
        """True if the decompressed content is in the cache."""
        return self._folder().has(_key(name, version))

    def data(self, name: str, version: str, make: Callable[[], NDArray[np.uint8]]) -> memoryview:
        """Decompressed content, mapped; calls `make()` in one process if it is missing."""
        key, folder = _key(name, version), self._folder()
        # One process decompresses while the others wait for its claim; after a timeout they try to take it.
        while (view := folder.get(key)) is None:
            with folder.claims() as claims:
                if claims.take(key.name()):
                    view = folder.get(key)  # another process may have added it before this one took the claim
                    return self._store(name, key, make()) if view is None else view
            claims.wait(key.name(), _CLAIM_WAIT_S)
        return view

    def _store(self, name: str, key: Key, data: NDArray[np.uint8]) -> memoryview:
        folder, view = self._folder(), data.data
        try:
            folder.put_file(key, view.nbytes, lambda write_at: write_at(0, view))
        except OSError as error:
            raise StoreError(
                f"{name} decompresses to {view.nbytes:,} bytes, which cannot be kept in {self.cache.folder}"
                f" ({error.strerror or 'the limit of the cache is lower'}): pass cache= a folder with more room"
            ) from error
        mapped = folder.get(key)
        return view.toreadonly() if mapped is None else mapped  # it may have been evicted already


def check_hashes(data: NDArray[np.uint8], hashes: Mapping[str, str], where: str) -> None:
    """SampleError unless the data have these hashes.

    `hashes` maps names of algorithms to hex digests.
    """
    for name, wanted in hashes.items():
        digest = _digest(name, data, where)
        if digest != wanted:
            raise SampleError(f"{where} is damaged: its {name} is {digest}, its index says {wanted}; copy it again")


def _digest(name: str, data: NDArray[np.uint8], where: str) -> str:
    if name in hashlib.algorithms_guaranteed and not name.startswith("shake"):
        return hashlib.new(name, data.data, usedforsecurity=False).hexdigest()
    if name not in _XXHASHES:
        raise ArgumentError(f"{where} has hashes of the unknown kind {name!r}; pass check_hashes=False")
    digest: str = getattr(optional.load("xxhash", "mds", f"checking {name} hashes"), name)(data).hexdigest()
    return digest


def _key(name: str, version: str) -> Key:
    return Key(name, f"{version} decompressed", 0, 0)
