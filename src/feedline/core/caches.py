"""What belongs to one process: opened on first use, never carried over a fork, never pickled.

The few things that were used last.

Values that are dear to make: made once for all threads, the least recently used forgotten beyond a bound.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

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


Key = TypeVar("Key")


Value = TypeVar("Value")


class LRUCache(Generic[Key, Value]):
    """At most `limit` values by key; the one unused for longest goes first. Safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """The value, which thereby is the last one used."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> Value:
        """Keep the value, and give it back."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)
        return value

    def drop(self, key: Key) -> None:
        """Forget the value, if there is one."""
        with self._lock:
            self._values.pop(key, None)

    def __len__(self) -> int:
        return len(self._values)


class Sized(Protocol):
    """What knows the memory that it takes."""

    @property
    def nbytes(self) -> int: ...


K = TypeVar("K", bound=Hashable)


V = TypeVar("V", bound=Sized)


class LoadingCache(Generic[K, V]):
    """`get(key, make)` gives the value that is kept, or makes it; other threads wait for it instead of making it too.

    The newest value is kept however large it is; beyond `limit_nbytes` those not used for longest are forgotten.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.made = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, Future[V]] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The memory of all values that are kept."""
        return self._nbytes

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`; what `make` raises is raised here, and the next call tries again."""
        while True:
            with self._lock:
                future = self._kept.get(key)
                if future is None:
                    mine = self._kept[key] = Future()
                    break
                self._kept.move_to_end(key)
            if future.exception() is None:
                return future.result()
            # the thread that made it was told why; the error is not shared, because each caller adds notes to it
        return self._make(key, mine, make)

    def _make(self, key: K, future: Future[V], make: Callable[[], V]) -> V:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._kept[key]
            future.set_exception(error)
            raise
        future.set_result(value)
        with self._lock:
            self.made += 1
            self._nbytes += value.nbytes
            for old in [other for other, kept in self._kept.items() if kept.done() and other != key]:
                if self._nbytes <= self.limit_nbytes:
                    break
                self._nbytes -= self._kept.pop(old).result().nbytes
        return value
