"""The settings of a cache."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from feedline.core.units import parse_nbytes
from feedline.errors import ArgumentError

_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*:/")


_SHARE = re.compile(r"(\d+(?:\.\d+)?) *%")


@dataclass(frozen=True)
class Cache:
    """A folder of this machine that keeps data read from stores.

    All processes and jobs that name the same folder share it.
    """

    folder: str | Path
    limit: int | str = "10%"
    """The maximum size: bytes, "200 GB", "200GiB", or a share of the disk of the folder, "10%"."""
    piece_nbytes: int = 4 << 20
    """Objects are fetched and kept in pieces of this size, cut at its multiples: a read of one byte fetches one piece.
    Choose a small size for scattered reads that are not repeated, and a size above the largest object to keep objects
    whole.
    """
    ahead_nbytes: int = 256 << 20
    """Bytes that a loader prefetches for its workers, by its schedule; 0: none."""

    def __post_init__(self) -> None:
        if not str(self.folder) or _ADDRESS.match(str(self.folder)):
            raise ArgumentError(f"Cache(folder={str(self.folder)!r}): give a folder of this machine")
        object.__setattr__(self, "folder", str(Path(self.folder).expanduser().absolute()))
        if sys.platform == "win32":
            raise ArgumentError("the cache needs file locks that Windows lacks; open the store without it")
        if self.ahead_nbytes < 0:
            raise ArgumentError(f"Cache(ahead_nbytes={self.ahead_nbytes}): give bytes, or 0 to fetch nothing ahead")
        if self.piece_nbytes < 1:
            raise ArgumentError(f"Cache(piece_nbytes={self.piece_nbytes}): give at least 1 byte")
        _parse_limit(self.limit)

    def limit_nbytes(self) -> int:
        """The limit in bytes, given the size of the disk."""
        share, nbytes = _parse_limit(self.limit)
        if share is None:
            return nbytes
        disk = os.statvfs(self.folder)
        return int(disk.f_frsize * disk.f_blocks * share)


def _parse_limit(limit: int | str) -> tuple[float | None, int]:
    """The share of the disk, or None, and the bytes."""
    match = _SHARE.fullmatch(str(limit).strip())
    share = float(match[1]) / 100 if match else None
    nbytes = parse_nbytes(str(limit)) if share is None else 0
    if nbytes is None or not (share is None or 0 < share <= 1) or (share is None and nbytes < 1):
        raise ArgumentError(f'Cache(limit={limit!r}): give bytes above 0, or text such as "200 GB" or "10%"')
    return share, nbytes
