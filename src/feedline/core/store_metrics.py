"""What the stores of this process did: counted as it happens, read as a frozen value."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from feedline.core.caches import PerProcess

if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Sums over all stores of this process and its loaders' workers."""

    requests: int = 0
    """Requests sent to remote stores, retries and hedges among them."""
    nbytes: int = 0
    """Bytes that remote stores sent and that passed every check."""
    retries: int = 0
    """Attempts that were repeated because the one before failed."""
    throttled: int = 0
    """Answers that asked for fewer requests (429 and 503)."""
    truncated: int = 0
    """Answers that ended too early; none was taken as data."""
    hedges: int = 0
    """Second requests, sent because the first was slower than most."""
    hedges_won: int = 0
    """Second requests that answered first."""
    failures: int = 0
    """Reads that failed for good."""
    waited_s: float = 0.0
    """Seconds between attempts, summed over all requests."""
    cache_hits: int = 0
    """Pieces that lay in a cache."""
    cache_misses: int = 0
    """Pieces that a cache had to fetch."""
    cache_shared: int = 0
    """Pieces that another thread or process fetched at the very moment they were wanted here."""
    cache_evicted: int = 0
    """Pieces that were removed to make room."""
    cache_damaged: int = 0
    """Pieces that did not match their checksum: removed, and fetched again."""

    def since(self, earlier: StoreStatistics) -> StoreStatistics:
        """What has happened after `earlier` was taken."""
        return StoreStatistics(
            **{field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)}
        )


class Counters:
    """Sums that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold = False
        self._sums: dict[str, Any] = {field.name: field.default for field in fields(StoreStatistics)}

    def add(self, **amounts: float) -> None:
        """Add to the sums of these names."""
        with self._lock:
            self._untold = True
            for name, amount in amounts.items():
                self._sums[name] += amount

    def statistics(self) -> StoreStatistics:
        """The sums as they are now."""
        with self._lock:
            return StoreStatistics(**self._sums)

    def taken(self) -> dict[str, float]:
        """What is not 0, and is 0 from now on."""
        if not self._untold:  # asked for with every batch
            return {}
        with self._lock:
            self._untold = False
            found = {name: amount for name, amount in self._sums.items() if amount}
            self._sums.update(dict.fromkeys(found, 0))
        return found


_counters = PerProcess(Counters)


def count(**amounts: float) -> None:
    """Add to the counters of this process."""
    _counters().add(**amounts)


def statistics() -> StoreStatistics:
    """What all stores of this process, and of its loaders' workers, did so far; a forked process starts at zero.

    Workers' sums arrive with the batches that the loop receives.
    """
    return _counters().statistics()


def taken() -> dict[str, float]:
    """What was counted in this process since it was last taken: a worker sends it along with its batches."""
    return _counters().taken()
