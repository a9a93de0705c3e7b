"""Caches: per process, of recently used values, loaded once, of results."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that each process opens for itself, on first use.

    `handle()` returns the result of `opening()`, called once per process; other threads wait for it. A forked process
    neither uses nor closes the value of its parent: closing it could affect the parent's. Pickles as `opening`.
    """

    def __init__(self, opening: Callable[[], T]) -> None:
        self._opening = opening
        self._values: dict[int, T] = {}  # by process id
        # Locks are per process, too: a lock that a thread of the parent held at the fork would never be released here.
        self._locks: dict[int, threading.Lock] = {}

    def __call__(self) -> T:
        pid = os.getpid()
        value = self._values.get(pid)
        return self._open(pid) if value is None else value

    def opened(self) -> T | None:
        """The value of this process; None before its first use."""
        return self._values.get(os.getpid())

    def _open(self, pid: int) -> T:
        # `setdefault` is atomic: all threads of the process get the same lock.
        with self._locks.setdefault(pid, threading.Lock()):
            if pid not in self._values:
                self._values[pid] = self._opening()
            return self._values[pid]

    def __reduce__(self) -> tuple[Any, ...]:
        return PerProcess, (self._opening,)


Key = TypeVar("Key")


Value = TypeVar("Value")


class LRUCache(Generic[Key, Value]):
    """At most `limit` values by key, the most recently used ones.

    Thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """The value, marked as the most recently used; None if absent."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> Value:
        """Store the value, and return it."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)
        return value

    def drop(self, key: Key) -> None:
        """Remove the value, if there is one."""
        with self._lock:
            self._values.pop(key, None)

    def __len__(self) -> int:
        return len(self._values)


class RecentResults:
    """A cache of the latest results of a pure function of integers.

    Pickles without the results. Thread-safe without a lock: a fork could copy a lock while it is held.
    """

    __slots__ = ("_keep", "_make", "_results")

    def __init__(self, make: Callable[..., Any], keep: int = 2) -> None:
        self._make = make
        self._keep = keep
        self._results: dict[tuple[int, ...], Any] = {}

    def __call__(self, *key: int) -> Any:
        """`make(*key)`, shared by all callers: never write to it."""
        result = self._results.get(key)
        if result is None:
            result = self._make(*key)
            # A new dict in one assignment: other threads may still read the old one.
            self._results = dict([*self._results.items(), (key, result)][-self._keep :])
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return RecentResults, (self._make, self._keep)


class Sized(Protocol):
    """A value that reports its memory."""

    @property
    def nbytes(self) -> int: ...


K = TypeVar("K", bound=Hashable)


V = TypeVar("V", bound=Sized)


class LoadingCache(Generic[K, V]):
    """A cache whose values are loaded once, for any number of threads.

    While one thread loads a value, others wait for it. The least recently used values beyond `limit_nbytes` are
    dropped; the newest is kept, however large it is.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.loads = 0
        self._lock = threading.Lock()
        self._futures: OrderedDict[K, Future[V]] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all values in the cache."""
        return self._nbytes

    def __contains__(self, key: K) -> bool:
        return key in self._futures

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, loaded with `make` if absent.

        An exception of `make` is raised here, and the next call tries again.
        """
        while True:
            with self._lock:
                future = self._futures.get(key)
                if future is None:
                    mine = self._futures[key] = Future()
                    break
                self._futures.move_to_end(key)
            if future.exception() is None:
                return future.result()
            # Try again: the loading thread raises the error, which is not shared because callers add notes to it.
        return self._make(key, mine, make)

    def _make(self, key: K, future: Future[V], make: Callable[[], V]) -> V:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._futures[key]
            future.set_exception(error)
            raise
        future.set_result(value)
        with self._lock:
            self.loads += 1
            self._nbytes += value.nbytes
            if self._nbytes > self.limit_nbytes:
                self._evict(key)
        return value

    def _evict(self, latest: K) -> None:
        """Drop the oldest values until the others fit.

        The latest value and values that are still being made stay.
        """
        for old in [other for other, cached in self._futures.items() if cached.done() and other != latest]:
            self._nbytes -= self._futures.pop(old).result().nbytes
            if self._nbytes <= self.limit_nbytes:
                break
