"""What will be wanted soon, fetched before it is."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from feedline.errors import ArgumentError
from feedline.stores.cache.cached import CachedStore
from feedline.stores.problems import StoreError


class Want(NamedTuple):
    """Bytes of an object that will be read; without `stop`, to its end."""

    path: str
    start: int = 0
    stop: int | None = None


Order = Sequence[tuple[CachedStore, Want]]
"""Wants that are read together: those of a batch."""


@dataclass(frozen=True, slots=True)
class PrefetchStatistics:
    """How far a prefetch is."""

    fetched: int
    """Orders that lie in the cache because of it, or lay there already."""
    passed: int
    """Orders that the reader was done with before they were begun."""
    failed: int
    """Orders that could not be fetched; the reader meets the error itself."""
    ahead_nbytes: int
    """Bytes fetched, or being fetched, that the reader has not come to."""
    peak_nbytes: int
    """The most that `ahead_nbytes` ever was."""


class Orders:
    """Threads that fetch into caches, in order, what a reader will read: many wants at a time.

    No further order is begun while `ahead_nbytes` or more lie ahead of the reader. `orders` is drawn from as it goes,
    by one thread at a time. `advance` may be called from any thread.
    """

    def __init__(self, orders: Iterable[Order], *, ahead_nbytes: int, threads: int) -> None:
        self._orders = enumerate(orders)
        self.limit_nbytes = ahead_nbytes
        """What `ahead_nbytes` is from now on."""
        self._drawing = threading.Lock()
        self._changed = threading.Condition()
        self._reached = 0
        self._ahead: dict[int, int] = {}
        self._peak_nbytes = 0
        self._counts = {"fetched": 0, "passed": 0, "failed": 0}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"feedline-prefetch-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin nothing more; what is under way comes to its end, and nobody waits for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the threads, which end after `stop`, and when there is nothing left to fetch."""
        for thread in self._threads:
            thread.join()

    def advance(self, count: int = 1) -> None:
        """The reader is done with `count` more of the orders."""
        with self._changed:
            self._reached += count
            for position in [position for position in self._ahead if position < self._reached]:
                del self._ahead[position]
            self._changed.notify_all()

    def statistics(self) -> PrefetchStatistics:
        """How far it is now."""
        with self._changed:
            return PrefetchStatistics(
                **self._counts, ahead_nbytes=sum(self._ahead.values()), peak_nbytes=self._peak_nbytes
            )

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            position, order = taken
            try:
                wanted = _by_object(order)
                self._note(position, sum(stop - start for spans in wanted.values() for start, stop in spans))
                for (store, path), spans in wanted.items():
                    store.fill_many(path, spans)
            except StoreError:
                self._add("failed")
            else:
                self._add("fetched")

    def _take(self) -> tuple[int, Order] | None:
        """The next order that the reader has not passed, once there is room for it; None at the end."""
        with self._drawing:
            with self._changed:
                self._changed.wait_for(self._has_room)
            while not self._closed and (taken := next(self._orders, None)) is not None:
                with self._changed:
                    if taken[0] >= self._reached:
                        self._ahead[taken[0]] = 1
                        return taken
                    self._counts["passed"] += 1
            return None

    def _has_room(self) -> bool:
        return self._closed or sum(self._ahead.values()) < self.limit_nbytes

    def _note(self, position: int, nbytes: int) -> None:
        with self._changed:
            if position in self._ahead:
                self._ahead[position] = nbytes
                self._peak_nbytes = max(self._peak_nbytes, sum(self._ahead.values()))
                self._changed.notify_all()

    def _add(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1


class Prefetch:
    """Fetches into a store's cache, in order, what a reader will read; a block at whose end nothing is left of it.

        with Prefetch(store, wants, ahead_nbytes=1 << 30) as ahead:
            for want in wants:
                use(store.read(*want))
                ahead.advance()

    No further want is begun while `ahead_nbytes` or more lie ahead of the reader. `wants` is drawn from as it goes, by
    one thread at a time. A loader does this by itself for datasets that are read through a cache.
    """

    def __init__(
        self, store: CachedStore, wants: Iterable[Want], *, ahead_nbytes: int = 256 << 20, threads: int = 4
    ) -> None:
        if not isinstance(store, CachedStore):
            raise ArgumentError("Prefetch fetches into a cache: open the store with open_store(address, cache=...)")
        if ahead_nbytes < 1 or threads < 1:
            raise ArgumentError("Prefetch: ahead_nbytes and threads are at least 1")
        self._orders = Orders(([(store, want)] for want in wants), ahead_nbytes=ahead_nbytes, threads=threads)

    def __enter__(self) -> Self:
        self._orders.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.stop()
        self._orders.join()

    def advance(self, count: int = 1) -> None:
        """The reader is done with `count` more of the wants; any thread may say so."""
        self._orders.advance(count)

    def statistics(self) -> PrefetchStatistics:
        """How far it is now."""
        return self._orders.statistics()


def _nbytes(store: CachedStore, want: Want) -> int:
    return max(0, (store.size(want.path) if want.stop is None else want.stop) - want.start)


def _by_object(order: Order) -> dict[tuple[CachedStore, str], list[tuple[int, int]]]:
    """The spans that are wanted of each object."""
    found: dict[tuple[CachedStore, str], list[tuple[int, int]]] = {}
    for store, want in order:
        found.setdefault((store, want.path), []).append((want.start, want.start + _nbytes(store, want)))
    return found
