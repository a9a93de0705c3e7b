"""Metrics of the stores of this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Any

from feedline.core.caches import PerProcess


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Sums over all stores of this process and its loaders' workers."""

    requests: int = 0
    """Requests sent to remote stores, retries and hedges among them."""
    nbytes: int = 0
    """Bytes that remote stores sent and that passed every check."""
    retries: int = 0
    """Attempts repeated after a failure."""
    throttled: int = 0
    """Answers that asked for fewer requests (429 and 503)."""
    truncated: int = 0
    """Answers that ended too early; none was used as data."""
    hedges: int = 0
    """Second requests, sent because the first was slower than most."""
    hedges_won: int = 0
    """Second requests that answered first."""
    failures: int = 0
    """Reads that failed for good."""
    waited_s: float = 0.0
    """Seconds between attempts, summed over all requests."""
    cache_hits: int = 0
    """Pieces found in a cache."""
    cache_misses: int = 0
    """Pieces that a cache had to fetch."""
    cache_shared: int = 0
    """Pieces that another thread or process was fetching when they were needed here."""
    cache_evicted: int = 0
    """Pieces that were removed to free space."""
    cache_damaged: int = 0
    """Pieces that did not match their checksum: removed, and fetched again."""

    def since(self, earlier: StoreStatistics) -> StoreStatistics:
        """The differences from an earlier value."""
        return StoreStatistics(
            **{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)}
        )


class Counters:
    """Sums that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal may read the statistics
        self._changed = False
        self._latest: StoreStatistics | None = None
        """The current sums, if they have been read."""
        self._sums: dict[str, Any] = {field.name: field.default for field in fields(StoreStatistics)}

    def add(self, **amounts: float) -> None:
        """Add to the sums of these names."""
        with self._lock:
            self._changed = True
            for name, amount in amounts.items():
                self._sums[name] += amount
            self._latest = None

    def statistics(self) -> StoreStatistics:
        """The current sums."""
        latest = self._latest  # each epoch reads them, and most loaders have no store
        if latest is None:
            with self._lock:
                latest = self._latest = StoreStatistics(**self._sums)
        return latest

    def take(self) -> dict[str, float]:
        """The sums other than 0; all are reset to 0."""
        if not self._changed:  # called with every batch
            return {}
        with self._lock:
            self._changed = False
            counts = {name: amount for name, amount in self._sums.items() if amount}
            self._sums.update(dict.fromkeys(counts, 0))
            self._latest = None
        return counts


_counters = PerProcess(Counters)


def count(**amounts: float) -> None:
    """Add to the counters of this process."""
    _counters().add(**amounts)


def statistics() -> StoreStatistics:
    """The metrics of all stores of this process and its workers.

    A forked process starts at zero. Workers' sums arrive with the batches that the loop receives.
    """
    return _counters().statistics()


def take() -> dict[str, float]:
    """The counts since the last call, reset to 0.

    A worker sends them along with its batches.
    """
    counters = _counters.opened()
    return {} if counters is None else counters.take()
