"""What a cache is to be."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from feedline.errors import ArgumentError

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) *([kMGT]?B|%)")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Cache:
    """A folder of this machine that keeps what was read, for all processes and jobs that name the same one."""

    folder: str | Path
    limit: int | str = "10%"
    """The most it may take: bytes, "200 GB", or a share of the disk that it lies on, "10%"."""
    piece_nbytes: int = 4 << 20
    """Objects are fetched and kept in pieces of this size, cut at its multiples: a read of one byte fetches one piece.
    Choose small pieces for scattered reads that do not come back, and one above the largest object to keep objects
    whole."""
    ahead_nbytes: int = 256 << 20
    """A loader fetches so much of what its schedule wants next before it is read; 0: nothing."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", str(Path(self.folder).expanduser().absolute()))
        if sys.platform == "win32":
            raise ArgumentError("the cache needs file locks that Windows lacks; open the store without it")
        if self.ahead_nbytes < 0:
            raise ArgumentError(f"Cache(ahead_nbytes={self.ahead_nbytes}): bytes, or 0 to fetch nothing ahead")
        if self.piece_nbytes < 1:
            raise ArgumentError(f"Cache(piece_nbytes={self.piece_nbytes}): at least 1 byte is needed")
        _parsed(self.limit)

    def limit_nbytes(self) -> int:
        """The limit in bytes, on the disk as it is."""
        number, unit = _parsed(self.limit)
        if unit != "%":
            return int(number * _UNITS[unit])
        disk = os.statvfs(self.folder)
        return int(disk.f_frsize * disk.f_blocks * number / 100)


def _parsed(limit: int | str) -> tuple[float, str]:
    match = _AMOUNT.fullmatch(limit if isinstance(limit, str) else f"{limit}B")
    if match is None or float(match[1]) <= 0 or (match[2] == "%" and float(match[1]) > 100):
        raise ArgumentError(f'Cache(limit={limit!r}): bytes as a number, or text such as "200 GB" or "10%", above 0')
    return float(match[1]), match[2]
