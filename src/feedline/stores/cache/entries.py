"""One file of the cache: a piece of an object.

A footer proves that the piece is complete. The module also has the pieces of an object that are in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from feedline.core.kernels import crc32
from feedline.stores.cache.locks import close_own, open_own
from feedline.stores.local import map_file
from feedline.stores.requests import FetchedRanges

if sys.platform != "win32":
    import fcntl


_FOOTER = struct.Struct("<8sQI")


_MAGIC = b"feedlin1"


class PieceKey(NamedTuple):
    """The identity of a piece: object, version, piece size and number."""

    address: str
    version: str
    piece_nbytes: int
    number: int

    def name(self) -> str:
        """The name of the piece's file."""
        return _name(self)


@lru_cache(1 << 16)  # computed for every batch that reads a piece
def _name(key: PieceKey) -> str:
    text = "\0".join((key.address, key.version, str(key.piece_nbytes), str(key.number)))
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()


class DamagedEntryError(Exception):
    """A file of the cache is damaged. Internal to the cache."""


def file_nbytes(nbytes: int) -> int:
    """The size of the file for `nbytes` bytes of data."""
    return nbytes + _FOOTER.size


def open_entry(file: BinaryIO, *, trusted: bool) -> memoryview:
    """Map the data in a file, and check them.

    The view stays valid while it is referenced, even when the file is removed. DamagedEntryError if its length or,
    unless it is `trusted`, its checksum is wrong.
    """
    size = os.fstat(file.fileno()).st_size
    if size < _FOOTER.size:
        raise DamagedEntryError
    content = _content(file, size)
    data = content[: -_FOOTER.size]
    # At the end of the file: a file that was cut off at any byte has no footer.
    magic, nbytes, promised = _FOOTER.unpack(content[-_FOOTER.size :])
    if (magic, nbytes) != (_MAGIC, data.nbytes) or not (trusted or checksum(data) == promised):
        raise DamagedEntryError
    return data


def _content(file: BinaryIO, nbytes: int) -> memoryview:
    try:
        return map_file(file.fileno(), nbytes)
    except OSError:  # the process has its maximum number of mappings, and all views are in use
        return memoryview(file.read(nbytes))


@contextlib.contextmanager
def temporary(path: Path, nbytes: int) -> Iterator[int]:
    """Create a file of this size, locked while the block runs.

    A temporary file without a lock has lost its writer.
    """
    fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        # At its final size at once, so that other processes count the space that it will take.
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, nbytes)
        yield fd
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        close_own(fd)


def write(fd: int, place: int, data: memoryview) -> None:
    """Write data into a temporary file; OSError on a full disk."""
    part, at = data.cast("B"), 0
    while at < part.nbytes:  # Linux writes at most 2 GiB at once
        at += os.pwrite(fd, part[at:], place + at)


def seal(fd: int, nbytes: int, checksum: int) -> None:
    """Write the footer, which proves that the data are complete."""
    write(fd, nbytes, memoryview(_FOOTER.pack(_MAGIC, nbytes, checksum)))


def map_sealed(fd: int, nbytes: int) -> memoryview:
    """Map the data of a sealed file."""
    return map_file(fd, file_nbytes(nbytes))[:nbytes]


def checksum(data: memoryview) -> int:
    """The checksum of bytes."""
    return crc32(data.cast("B"))


def checksum_of(fd: int, nbytes: int) -> int:
    """The checksum of the data written into a file."""
    return checksum(map_file(fd, nbytes))


def is_abandoned(path: Path) -> bool:
    """True if the writer of a temporary file has ended.

    A file that is being created may look abandoned.
    """
    try:
        fd = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        close_own(fd)
    return True


class MissingPieceError(Exception):
    """A piece is not in memory, so it must be read."""


class Pieces:
    """The pieces of an object that are in memory.

    `find(number)` returns a piece of `piece_nbytes` bytes, fewer at the end of the object, or None. Pieces that were
    found stay referenced. For one thread.
    """

    def __init__(self, find: Callable[[int], memoryview | None], piece_nbytes: int) -> None:
        self._find, self._piece_nbytes = find, piece_nbytes
        self._found: dict[int, memoryview] = {}

    def cut(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` up to `stop`, within the object.

        A view if one piece has all of them, else a copy. MissingPieceError if a piece is not in memory.
        """
        if start == stop:
            return memoryview(b"")
        size = self._piece_nbytes
        first, last = start // size, (stop - 1) // size
        if first == last:  # a division is faster than the search of `FetchedRanges`, and every sample passes here
            return self._piece(first)[start - first * size : stop - first * size]
        numbers = range(first, last + 1)
        spans = [(number * size, (number + 1) * size) for number in numbers]
        return FetchedRanges(spans, [self._piece(number) for number in numbers]).cut(start, stop)

    def _piece(self, number: int) -> memoryview:
        data = self._found.get(number)
        if data is None:
            data = self._find(number)
            if data is None:
                raise MissingPieceError
            self._found[number] = data
        return data
