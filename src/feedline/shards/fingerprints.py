"""Which tar an index belongs to: size and time where they fit, else a glance at what is in it."""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.shards.tar import BLOCK

_PLACES = 16


class Version(NamedTuple):
    """What tells one state of a file from another without reading it."""

    nbytes: int
    modified_ns: int


def version_of(path: str) -> Version:
    """The state of the file as it is now; FileNotFoundError names one that is not there."""
    status = os.stat(path)  # noqa: PTH116 - asked of every shard of every batch
    return Version(status.st_size, status.st_mtime_ns)


def fingerprint(tar: str, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> str:
    """64 bits in hex, of the tar's size and of the headers and last bytes of 16 members, the last one among them.

    A copy on another machine has the same, whatever its times. Two tars of one size, whose members have the same names
    and sizes, differ in it if one of those 16 pairs of members ends differently.
    """
    digest = hashlib.blake2b(digest_size=8)
    held = np.flatnonzero(starts)
    order = held[np.argsort(starts.reshape(-1)[held])]
    chosen = order[np.linspace(0, len(order) - 1, min(_PLACES, len(order))).astype(np.int64)]
    with open(tar, "rb", buffering=0) as file:
        digest.update(b"%d" % os.fstat(file.fileno()).st_size)
        for start, size in zip(starts.reshape(-1)[chosen].tolist(), sizes.reshape(-1)[chosen].tolist(), strict=True):
            digest.update(os.pread(file.fileno(), BLOCK, start - BLOCK))
            digest.update(os.pread(file.fileno(), BLOCK, start + max(0, size - BLOCK)))
    return digest.hexdigest()
