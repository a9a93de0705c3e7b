"""Reading ahead as a block, for readers that know what they will read."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from feedline.errors import ArgumentError
from feedline.stores.cache.cached import CachedStore
from feedline.stores.cache.orders import Orders, PrefetchStatistics, Want


class Prefetch:
    """Fetches into a store's cache, in order, what a reader will read; a block at whose end nothing is left of it.

        with Prefetch(store, wants, ahead_nbytes=1 << 30) as ahead:
            for want in wants:
                use(store.read(*want))
                ahead.advance()

    No further want is begun while `ahead_nbytes` or more lie ahead of the reader; so many `threads` fetch. `wants` is
    drawn from as it goes, by one thread. A loader does this by itself for datasets that are read through a cache.
    """

    def __init__(
        self, store: CachedStore, wants: Iterable[Want], *, ahead_nbytes: int = 256 << 20, threads: int = 16
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
