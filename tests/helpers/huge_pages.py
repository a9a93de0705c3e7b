"""Huge pages for the memory of a process that forks many times."""

from __future__ import annotations

import ctypes
from pathlib import Path

_COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1, which `mmap` does not know."""

_SIZE = 2 << 20


def use_huge_pages() -> int:
    """Move private memory to huge pages, and return the MiB moved, 0 where the system cannot.

    A fork copies one entry for each page. With small pages, these are 40,000 for a process that has imported torch.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    moved = 0
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        place, mode, *_, inode = mapping.split(maxsplit=5)[:5]
        if mode != "rw-p" or inode != "0":
            continue
        first, last = (int(address, 16) for address in place.split("-"))
        first = -(-first // _SIZE) * _SIZE
        # One at a time: a range ends at its first page that cannot be moved.
        moved += sum(advise(start, _SIZE, _COLLAPSE) == 0 for start in range(first, last - _SIZE + 1, _SIZE))
    return moved * _SIZE >> 20
