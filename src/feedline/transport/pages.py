"""What the kernel says of this process's memory: which of it is plain, and which pages are still those of a file."""

from __future__ import annotations

import mmap
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import BinaryIO

import numpy as np

from feedline.transport.memory import MAPPED_NAME, Piece

PAGE_NBYTES = mmap.PAGESIZE

# proc_pid_smaps(5): readable, writable, may be made so and executable, accounted for, soft-dirty, advice for or against
# huge pages. Whatever else a mapping may be (locked, shared, a device's, left out of a fork, watched), it is not plain.
_PLAIN_FLAGS = {"rd", "wr", "mr", "mw", "me", "ac", "sd", "hg", "nh"}

_AREA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) (\S+) (\d+) *(.*)")

# proc_pid_pagemap(5): the page is in memory, and it is a page of a file: not a private copy.
_UNTOUCHED = np.uint64(1 << 63 | 1 << 61)


class Stretches:
    """Addresses of this process; to be added in ascending order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        if self._stops and self._stops[-1] == start:
            self._stops[-1] = stop
        else:
            self._starts.append(start)
            self._stops.append(stop)

    def cover(self, start: int, stop: int) -> bool:
        """Whether all addresses from `start` up to but not including `stop` are among them."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and stop <= self._stops[at]


def plain_memory() -> Stretches:
    """Private, writable memory without any peculiarity: no file's but ours, not locked, not of huge pages by contract.

    The heap does not count. Raises OSError where there is no /proc.
    """
    plain = Stretches()
    with open("/proc/self/smaps", errors="replace") as lines:
        for line in lines:
            if found := _AREA.match(line):
                area = found
            elif line.startswith("VmFlags:") and _is_private(area) and _PLAIN_FLAGS.issuperset(line.split()[1:]):
                plain.add(int(area[1], 16), int(area[2], 16))
    return plain


def doubtful(fd: int, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """What of the pieces may differ from the file: all but pages of which the kernel says that they are the file's."""
    try:
        areas = _mapped_from(fd)
        pagemap = open("/proc/self/pagemap", "rb")  # noqa: SIM115 - closed below
    except OSError:
        yield from pieces
        return
    with pagemap:
        for piece in pieces:
            yield from _doubtful_parts(piece, areas, pagemap)


def _is_private(area: re.Match[str]) -> bool:
    permissions, inode, name = area[3], area[6], area[7]
    is_anonymous = inode == "0" and (not name or name.startswith("[anon:"))
    return permissions == "rw-p" and (is_anonymous or name == MAPPED_NAME)


def _mapped_from(fd: int) -> list[Piece]:
    """Where this process has private mappings of the file, by ascending address."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    with open("/proc/self/maps", errors="replace") as lines:
        areas = [area for line in lines if (area := _AREA.match(line)) and area[3].endswith("p")]
    return [
        Piece(int(area[4], 16), start := int(area[1], 16), int(area[2], 16) - start)
        for area in areas
        if (area[5], int(area[6])) == (device, status.st_ino)
    ]


def _doubtful_parts(piece: Piece, areas: list[Piece], pagemap: BinaryIO) -> Iterator[Piece]:
    shift = piece.offset - piece.address
    at, end = piece.address, piece.address + piece.nbytes
    first = max(bisect_right(areas, at, key=attrgetter("address")) - 1, 0)
    for area in areas[first : bisect_left(areas, end, key=attrgetter("address"))]:
        start, stop = max(at, area.address), min(end, area.address + area.nbytes)
        if start < stop and area.offset - area.address == shift and _is_untouched(start, stop, pagemap):
            yield Piece(at + shift, at, start - at)
            at = stop
    yield Piece(at + shift, at, end - at)


def _is_untouched(start: int, stop: int, pagemap: BinaryIO) -> bool:
    first, last = start // PAGE_NBYTES, -(-stop // PAGE_NBYTES)
    pagemap.seek(8 * first)
    entries = np.frombuffer(pagemap.read(8 * (last - first)), np.uint64)
    return len(entries) == last - first and bool(((entries & _UNTOUCHED) == _UNTOUCHED).all())
