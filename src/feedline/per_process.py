"""What belongs to one process: opened on first use, never carried over a fork, never pickled."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """`handle()` gives what `opening()` gave, which is called once in each process, by whichever thread comes first.

    What a forked process inherits from its parent is left alone: not used, and not closed either, because closing may
    reach the parent's side of it. Pickles as `opening`.
    """

    def __init__(self, opening: Callable[[], T]) -> None:
        self._opening = opening
        self._held: dict[int, T] = {}
        # By process as well: a lock that another thread of the parent held at the fork would never be released here.
        self._locks: dict[int, Lock] = {}

    def __call__(self) -> T:
        pid = os.getpid()
        held = self._held.get(pid)
        return self._opened(pid) if held is None else held

    def _opened(self, pid: int) -> T:
        with self._locks.setdefault(pid, Lock()):
            if pid not in self._held:
                self._held[pid] = self._opening()
            return self._held[pid]

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProcess, (self._opening,)
