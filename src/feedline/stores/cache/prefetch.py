"""What will be wanted soon, fetched before it is."""

from __future__ import annotations

import threading
from collections.abc import Iterable
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


@dataclass(frozen=True, slots=True)
class PrefetchStatistics:
    """How far a prefetch is."""

    fetched: int
    """Wants that lie in the cache because of it, or lay there already."""
    passed: int
    """Wants that the reader was done with before they were begun."""
    failed: int
    """Wants that could not be fetched; the reader meets the error itself."""
    ahead_nbytes: int
    """Bytes fetched, or being fetched, that the reader has not come to."""
    peak_nbytes: int
    """The most that `ahead_nbytes` ever was."""


class Prefetch:
    """Threads that fetch into a store's cache, in order, what a reader will read; a block that joins them.

        with Prefetch(store, wants, ahead_nbytes=1 << 30) as ahead:
            for want in wants:
                use(store.read(*want))
                ahead.advance()

    No further want is begun while `ahead_nbytes` or more lie ahead of the reader. `wants` is drawn from as it goes, by
    one thread at a time. `advance` may be called from any thread.
    """

    def __init__(
        self, store: CachedStore, wants: Iterable[Want], *, ahead_nbytes: int = 256 << 20, threads: int = 4
    ) -> None:
        if not isinstance(store, CachedStore):
            raise ArgumentError("Prefetch fetches into a cache: open the store with open_store(address, cache=...)")
        if ahead_nbytes < 1 or threads < 1:
            raise ArgumentError("Prefetch: ahead_nbytes and threads are at least 1")
        self._store = store
        self._wants = enumerate(wants)
        self._limit_nbytes = ahead_nbytes
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

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def advance(self, count: int = 1) -> None:
        """The reader is done with `count` more of the wants."""
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
            position, want = taken
            try:
                nbytes = self._nbytes(want)
                self._note(position, nbytes)
                self._store.fill(want.path, want.start, want.start + nbytes)
            except StoreError:
                self._add("failed")
            else:
                self._add("fetched")

    def _take(self) -> tuple[int, Want] | None:
        """The next want that the reader has not passed, once there is room for it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or sum(self._ahead.values()) < self._limit_nbytes)
            while not self._closed and (taken := next(self._wants, None)) is not None:
                if taken[0] >= self._reached:
                    self._ahead[taken[0]] = 1
                    return taken
                self._counts["passed"] += 1
            return None

    def _nbytes(self, want: Want) -> int:
        return max(0, (self._store.size(want.path) if want.stop is None else want.stop) - want.start)

    def _note(self, position: int, nbytes: int) -> None:
        with self._changed:
            if position in self._ahead:
                self._ahead[position] = nbytes
                self._peak_nbytes = max(self._peak_nbytes, sum(self._ahead.values()))
                self._changed.notify_all()

    def _add(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1
