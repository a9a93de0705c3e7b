"""A lock of a module, as a library has one, and samples that need it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

LOCK = threading.Lock()

_pthreads = ctypes.CDLL(None)
_mutex = ctypes.create_string_buffer(64)


@contextmanager
def native_mutex() -> Iterator[None]:
    """Hold a mutex of the C library."""
    _pthreads.pthread_mutex_lock(_mutex)
    try:
        yield
    finally:
        _pthreads.pthread_mutex_unlock(_mutex)


LOCKS: dict[str, Callable[[], Any]] = {"python": lambda: LOCK, "native": native_mutex}


class Guarded:
    """Sample `i` is `[i, i * i]`, and needs a lock."""

    def __init__(self, lock: str) -> None:
        self.lock = lock

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        with LOCKS[self.lock]():
            return torch.tensor([index, index * index])


@contextmanager
def held(lock: str) -> Iterator[threading.Event]:
    """Let another thread hold the lock until the event is set, at the latest at the end of the block."""
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCKS[lock]():
            taken.set()
            release.wait()

    thread = threading.Thread(target=hold, name="holder")
    thread.start()
    taken.wait()
    try:
        yield release
    finally:
        release.set()
        thread.join()
