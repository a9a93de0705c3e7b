"""Values that are dear to make: made once for all threads, the least recently used forgotten beyond a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """What knows the memory that it takes."""

    @property
    def nbytes(self) -> int: ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Sized)


class OnceCache(Generic[K, V]):
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
