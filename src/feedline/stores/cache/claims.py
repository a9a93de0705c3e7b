"""Who fetches what: a claim is a lock on one byte of a file, which the system takes back when its holder dies."""

from __future__ import annotations

import os
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from feedline import cancelling
from feedline.stores.cache.descriptors import close_own, open_own

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
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock(name))
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
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _lock(name))
                finally:
                    close_own(fd)
            over.set()

        # The system's wait has no time limit, and somebody stopped by a debugger holds on to its claims.
        threading.Thread(target=lock, name="feedline-claim", daemon=True).start()
        cancelling.wait(over, timeout_s)


def _lock(name: str) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, int(name[:15], 16), 1, 0)
