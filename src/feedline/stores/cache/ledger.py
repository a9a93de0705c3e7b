"""How much room is taken: one number that all processes share, never too small, and now and then counted anew."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_NUMBER = struct.Struct("<Q")


class Account:
    """The bytes taken, while nobody else may change them. Every change is written down at once.

    Room is booked before it is taken and given back after it is free: whoever dies in between leaves the number too
    large, which the next count puts right, and never too small.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        content = os.pread(fd, _NUMBER.size, 0)
        self.known = len(content) == _NUMBER.size
        self._nbytes = _NUMBER.unpack(content)[0] if self.known else 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @nbytes.setter
    def nbytes(self, nbytes: int) -> None:
        os.pwrite(self._fd, _NUMBER.pack(max(0, nbytes)), 0)
        self._nbytes = max(0, nbytes)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Account]:
    """The account, for one thread of one process at a time; the lock goes with its holder, however that dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield Account(fd)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked meanwhile shares the lock: closing alone would not do
        os.close(fd)
