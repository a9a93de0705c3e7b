"""How much room is taken: one number that all processes share, never too small, and now and then counted anew."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from feedline.stores.cache.descriptors import close_own, open_own

if sys.platform != "win32":
    import fcntl

_NUMBER = struct.Struct("<Q")
_PATIENCE_S = 10.0
"""Longer than counting and removing the files of any cache takes."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


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


class LedgerHeldError(TimeoutError):
    """Another process has held the ledger for too long: stopped by a debugger, for instance."""


class Ledger:
    """The account in a file, for one thread of one process at a time; a lock on it goes with its holder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._within = threading.Lock()
        self._given_up = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[Account]:
        """The account. LedgerHeldError after `_PATIENCE_S`, and from then on at once, until it can be had again."""
        patience_s = 0.0 if self._given_up else _PATIENCE_S
        end_s = monotonic() + patience_s
        if not self._within.acquire(timeout=patience_s):
            raise self._held()
        try:
            fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
            try:
                self._wait(fd, end_s)
                yield Account(fd)
            finally:
                close_own(fd)
        finally:
            self._within.release()

    def _wait(self, fd: int, end_s: float) -> None:
        pause_s = _PAUSE_S
        while not _taken(fd):
            if monotonic() >= end_s:
                raise self._held()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._given_up = False

    def _held(self) -> LedgerHeldError:
        self._given_up = True
        return LedgerHeldError(
            errno.ETIMEDOUT, f"another process has held the ledger for {_PATIENCE_S:.0f} s", str(self._path)
        )


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
