"""Which tar an index belongs to, where size and time do not tell: a glance at what is in it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from feedline.shards.reading import Source
from feedline.shards.tar import BLOCK

_PLACES = 16


def fingerprint(source: Source, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> str:
    """64 bits in hex, of the tar's size and of the headers and last bytes of 16 members, the last one among them.

    A copy on another machine, or in a store, has the same, whatever its times. Two tars of one size, whose members have
    the same names and sizes, differ in it if one of those 16 pairs of members ends differently.
    """
    digest = hashlib.blake2b(digest_size=8)
    held = np.flatnonzero(starts)
    order = held[np.argsort(starts.reshape(-1)[held])]
    chosen = order[np.linspace(0, len(order) - 1, min(_PLACES, len(order))).astype(np.int64)]
    spans = []
    for start, size in zip(starts.reshape(-1)[chosen].tolist(), sizes.reshape(-1)[chosen].tolist(), strict=True):
        last = start + max(0, size - BLOCK)
        spans += [(start - BLOCK, start), (last, last + BLOCK)]
    digest.update(b"%d" % source.nbytes)
    for data in source.looks(spans):
        digest.update(data)
    return digest.hexdigest()


def hashed(source: Source) -> str:
    """The checksum of all bytes: BLAKE2b of 256 bits, in hex."""
    digest, at = hashlib.blake2b(digest_size=32), 0
    while chunk := source.read(at, 1 << 22):
        digest.update(chunk)
        at += len(chunk)
    return digest.hexdigest()
