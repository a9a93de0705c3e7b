"""Who fetches what: a claim is a lock on one byte of a file, which the system takes back when its holder dies.

Descriptors for locks: no forked process inherits one, or the lock would outlive the process that took it.

How much room is taken: one number that all processes share, never too small, and now and then counted anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from feedline.core import threads

_fork_lock = threading.RLock()


_ours: set[int] = set()


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor that is closed in every process forked from this one; given back with `close_own`."""
    with _fork_lock:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _ours.add(fd)
        return fd


def close_own(fd: int) -> None:
    """Close a descriptor of `open_own`, if it is still this process's."""
    with _fork_lock:
        if fd in _ours:
            _ours.remove(fd)
            os.close(fd)


def _forget() -> None:
    for fd in _ours:
        os.close(fd)
    _ours.clear()
    _fork_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_forget)


if sys.platform != "win32":
    import fcntl


_FLOCK = struct.Struct("hhqqi")
"""`struct flock` of Linux: kind, whence, start, length, pid."""


class Claims:
    """The claims of one thread, given back when the block is left. Where the system lacks such locks, all succeed.

    Locks of open file descriptions, not of processes: threads exclude each other, too, and no `close` elsewhere in the
    process drops them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> Self:
        if hasattr(fcntl, "F_OFD_SETLK"):
            try:
                self._fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
            except OSError:  # a folder that cannot be written to: nobody else fetches into it either
                self._fd = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            close_own(self._fd)

    def take(self, name: str) -> bool:
        """Whether the piece of this name is ours to fetch; else somebody fetches it right now."""
        if self._fd is None:
            return True
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(name))
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: fetched twice at worst
            return True
        return True

    def wait(self, name: str, timeout_s: float) -> None:
        """Return when the one who fetches the piece has done so, or is gone, or has taken too long."""
        over = threading.Event()

        def lock() -> None:
            with suppress(OSError):  # a folder that was removed meanwhile: there is nobody to wait for
                fd = open_own(self._path, os.O_RDWR)
                try:
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _flock(name))
                finally:
                    close_own(fd)
            over.set()

        # The system's wait has no time limit, and somebody stopped by a debugger holds on to its claims.
        threading.Thread(target=lock, name="feedline-claim", daemon=True).start()
        threads.wait(over, timeout_s)


def _flock(name: str) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, int(name[:15], 16), 1, 0)


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
