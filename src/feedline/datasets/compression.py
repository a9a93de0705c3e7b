"""Decompression of data in memory.

The decompressed size is bounded by the size in an index, and checked against it, as are hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.errors import ArgumentError, SampleError

try:
    from lzma import LZMAError as LZMAError  # noqa: PLC0414 - exported
except ImportError:  # Python was built without liblzma, so nothing raises this error
    LZMAError = EOFError  # type: ignore[misc, assignment]


_CODECS = {"br": "brotli", "bz2": "bzip2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}


ORDINARY_NBYTES = 1 << 30
"""Sizes up to this never count as a decompression bomb."""


_ORDINARY_RATIO = 100


_XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")


def inflate(data: Any, codec: str, nbytes: int, where: str, extra: str) -> NDArray[np.uint8]:
    """Decompress `data` to exactly `nbytes` bytes.

    SampleError for damaged data and for any other size, ArgumentError for an unknown codec. Errors name the data by
    `where`.
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


def check_hashes(data: NDArray[np.uint8], hashes: Mapping[str, str], where: str) -> None:
    """Raise SampleError unless the data have these hashes.

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
