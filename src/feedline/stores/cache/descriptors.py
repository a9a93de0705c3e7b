"""Descriptors for locks: no forked process inherits one, or the lock would outlive the process that took it."""

from __future__ import annotations

import os
import threading

_lock = threading.RLock()
_ours: set[int] = set()


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor that is closed in every process forked from this one; given back with `close_own`."""
    with _lock:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _ours.add(fd)
        return fd


def close_own(fd: int) -> None:
    """Close a descriptor of `open_own`, if it is still this process's."""
    with _lock:
        if fd in _ours:
            _ours.remove(fd)
            os.close(fd)


def _forget() -> None:
    for fd in _ours:
        os.close(fd)
    _ours.clear()
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget)
