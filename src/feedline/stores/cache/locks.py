"""Locks of the cache: fetch locks and the size account.

Both are file locks that the system releases when their holder ends, on descriptors that no forked process inherits: the
lock would outlive the process that took it.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Self, TypeVar

from feedline.core import threads

_fork_lock = threading.RLock()


_ours: set[int] = set()


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open a descriptor that forked processes close; see `close_own`."""
    with _fork_lock:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _ours.add(fd)
        return fd


def close_own(fd: int) -> None:
    """Close a descriptor of `open_own`, if this process still owns it."""
    with _fork_lock:
        if fd in _ours:
            _ours.remove(fd)
            os.close(fd)


def _forget() -> None:
    # In a forked child: a file lock lasts for as long as any process has its descriptor open.
    for fd in _ours:
        os.close(fd)
    _ours.clear()
    _fork_lock.release()


if hasattr(os, "register_at_fork"):
    # Held during the fork: no other thread is then between opening a descriptor and recording it.
    os.register_at_fork(before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_forget)


if sys.platform != "win32":
    import fcntl


_FLOCK = struct.Struct("hhqqi")
"""`struct flock` of Linux: kind, whence, start, length, pid."""


class FetchLocks:
    """The fetch locks of one thread, released when the block ends.

    A fetch lock is a lock on one byte of a file. Where the system lacks such locks, all are granted. They are locks of
    open file descriptions, not of processes: threads exclude each other, too, and no `close` elsewhere in the process
    drops them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> Self:
        if hasattr(fcntl, "F_OFD_SETLK"):
            try:
                self._fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
            except OSError:  # a folder that cannot be written to: no other process fetches into it either
                self._fd = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            close_own(self._fd)

    def take(self, name: str) -> bool:
        """Lock a piece for fetching; False while another process fetches it."""
        if self._fd is None:
            return True
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(name))
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: in the worst case, the piece is fetched twice
            return True
        return True

    def wait(self, name: str, timeout_s: float) -> None:
        """Wait until the fetcher of a piece has finished or ended.

        The wait ends at the timeout at the latest.
        """
        over = threading.Event()

        def lock() -> None:
            with suppress(OSError):  # the folder was removed: there is no fetch to wait for
                fd = open_own(self._path, os.O_RDWR)
                try:
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _flock(name))
                finally:
                    close_own(fd)
            over.set()

        # In a thread: the system's wait has no timeout, and a process stopped by a debugger keeps its locks.
        threading.Thread(target=lock, name="feedline-lock", daemon=True).start()
        threads.wait(over, timeout_s)


T = TypeVar("T")


WAIT_S = 60.0
"""Time after which a lock is tried again: its holder may have been stopped."""


def find_or_make(path: Path, name: str, find: Callable[[], T | None], make: Callable[[], T]) -> T:
    """The result of `find()`; if that is None, the result of `make()`.

    One process of the machine calls `make`, under the lock `name` in the file `path`, while the others wait for its
    result.
    """
    while (found := find()) is None:
        with FetchLocks(path) as fetch_locks:
            if fetch_locks.take(name):
                found = find()  # another process may have made it before this one took the lock
                return make() if found is None else found
        fetch_locks.wait(name, WAIT_S)
    return found


def _flock(name: str) -> bytes:
    # The offset of the byte stands for the piece: the first 60 bits of its name, as offsets have 63. Two pieces with
    # equal bits would only wait for each other.
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, int(name[:15], 16), 1, 0)


_NUMBER = struct.Struct("<Q")


_PATIENCE_S = 10.0
"""Longer than the time to count and evict the files of any cache."""


_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


class Account:
    """The bytes taken, locked against other processes.

    Every change is written at once. Space is reserved before it is used, and released after it is free. If a process is
    killed in between, the number is too large, never too small, and the next count corrects it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # A full disk truncates this file: then the files of the cache are counted instead.
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


class AccountHeldError(TimeoutError):
    """Another process has held the account too long, as in a debugger."""


class AccountFile:
    """The account in a file, for one thread at a time.

    Its lock is released when its holder ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread_lock = threading.Lock()
        self._gave_up = False

    @contextmanager
    def locked(self) -> Iterator[Account]:
        """Lock the account for a block.

        AccountHeldError after `_PATIENCE_S`. Further calls raise it at once, until the account can be locked again.
        """
        patience_s = 0.0 if self._gave_up else _PATIENCE_S
        end_s = monotonic() + patience_s
        # flock belongs to the open file, but each entry opens its own. Another lock excludes the threads of this
        # process, so that together they wait only once.
        if not self._thread_lock.acquire(timeout=patience_s):
            raise self._held_error()
        try:
            fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
            try:
                self._wait(fd, end_s)
                yield Account(fd)
            finally:
                close_own(fd)
        finally:
            self._thread_lock.release()

    def _wait(self, fd: int, end_s: float) -> None:
        pause_s = _PAUSE_S
        while not _try_lock(fd):  # polled, because flock waits without a timeout
            if monotonic() >= end_s:
                raise self._held_error()
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._gave_up = False

    def _held_error(self) -> AccountHeldError:
        self._gave_up = True
        return AccountHeldError(
            errno.ETIMEDOUT, f"another process has held the size account for {_PATIENCE_S:.0f} s", str(self._path)
        )


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
