"""One file of the cache: a piece of an object, and at its end what tells that it is all there.

Pieces of an object that are in memory.
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
from feedline.stores.local import mapped
from feedline.stores.requests import join_views

if sys.platform != "win32":
    import fcntl


_FOOTER = struct.Struct("<8sQI")


_MAGIC = b"feedlin1"


class Key(NamedTuple):
    """What a piece is: the address of its object, the version of that, and which of the pieces of this size."""

    address: str
    version: str
    piece_nbytes: int
    number: int

    def name(self) -> str:
        """The name of the piece's file."""
        return _name(self)


@lru_cache(1 << 16)  # a piece is asked for with every batch that wants anything of it
def _name(key: Key) -> str:
    text = "\0".join((key.address, key.version, str(key.piece_nbytes), str(key.number)))
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()


class DamagedEntryError(Exception):
    """A file of the cache is not what was written into it. It never leaves the package."""


def file_nbytes(nbytes: int) -> int:
    """The size of the file that holds so many bytes of data."""
    return nbytes + _FOOTER.size


def opened(file: BinaryIO, *, trusted: bool) -> memoryview:
    """The data in a file, mapped and checked; valid for as long as it is held, even when the file is removed.

    DamagedError if its length or, unless it is `trusted`, its checksum is wrong.
    """
    size = os.fstat(file.fileno()).st_size
    if size < _FOOTER.size:
        raise DamagedEntryError
    content = _content(file, size)
    data = content[: -_FOOTER.size]
    magic, nbytes, promised = _FOOTER.unpack(content[-_FOOTER.size :])
    if (magic, nbytes) != (_MAGIC, data.nbytes) or not (trusted or checksum(data) == promised):
        raise DamagedEntryError
    return data


def _content(file: BinaryIO, nbytes: int) -> memoryview:
    try:
        return mapped(file.fileno(), nbytes)
    except OSError:  # somebody keeps so many views that the process may map no more
        return memoryview(file.read(nbytes))


@contextlib.contextmanager
def temporary(path: Path, nbytes: int) -> Iterator[int]:
    """A new file of this size, locked for as long as the block runs: what is not locked has lost its writer."""
    fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, nbytes)
        yield fd
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        close_own(fd)


def write(fd: int, place: int, data: memoryview) -> None:
    """Write a part of the data of a temporary file; OSError when the disk is full."""
    part, at = data.cast("B"), 0
    while at < part.nbytes:  # Linux writes at most 2 GiB at once
        at += os.pwrite(fd, part[at:], place + at)


def seal(fd: int, nbytes: int, checksum: int) -> None:
    """Write behind the data what tells that all of them are there, and that they are these."""
    write(fd, nbytes, memoryview(_FOOTER.pack(_MAGIC, nbytes, checksum)))


def checksum(data: memoryview) -> int:
    """The checksum of data."""
    return crc32(data.cast("B"))


def checksum_of(fd: int, nbytes: int) -> int:
    """The checksum of what was written into a file."""
    return checksum(mapped(fd, nbytes))


def abandoned(path: Path) -> bool:
    """Whether the writer of a temporary file is gone. One that is just being made may be taken for abandoned."""
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
    """A piece is not in memory. Whoever asked for it reads it instead."""


class Pieces:
    """Pieces of `piece_nbytes` bytes, fewer at the end of the object, as `find` gives them by number; None for others.

    Those that were found are held. For one thread.
    """

    def __init__(self, find: Callable[[int], memoryview | None], piece_nbytes: int) -> None:
        self._find, self._piece_nbytes = find, piece_nbytes
        self._found: dict[int, memoryview] = {}

    def cut(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` up to `stop`, within the object: a view if they lie in one piece, else a copy."""
        if start == stop:
            return memoryview(b"")
        size = self._piece_nbytes
        first, last = start // size, (stop - 1) // size
        if first == last:
            return self._piece(first)[start - first * size : stop - first * size]
        parts = [self._piece(number) for number in range(first, last + 1)]
        return join_views([parts[0][start - first * size :], *parts[1:-1], parts[-1][: stop - last * size]])

    def _piece(self, number: int) -> memoryview:
        data = self._found.get(number)
        if data is None:
            data = self._find(number)
            if data is None:
                raise MissingPieceError
            self._found[number] = data
        return data
