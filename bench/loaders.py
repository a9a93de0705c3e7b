"""First batch and steady throughput of a loader, measured with the same code for torch and feedline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from time import perf_counter
from typing import Any

WARM_UP = 8


def rate(make: Callable[[], Iterable[Any]], per_batch: float = 1, *, most_s: float = 2.0) -> Callable[[], float]:
    """A measure of units per second of one epoch, or of `most_s` of it, after the first batches."""

    def measure() -> float:
        loader = make()
        with closing(loader) if hasattr(loader, "close") else nullcontext():
            batches = iter(loader)
            for _ in range(WARM_UP):
                next(batches)
            count, start = 0, perf_counter()
            for _ in batches:
                count += 1
                if perf_counter() - start > most_s:
                    break
            seconds = perf_counter() - start
            del batches
        return count * per_batch / seconds

    return measure


def first_batch(make: Callable[[], Iterable[Any]]) -> float:
    """Seconds from the construction of a loader to its first batch."""
    start = perf_counter()
    iterator = iter(make())
    next(iterator)
    seconds = perf_counter() - start
    del iterator
    return seconds
