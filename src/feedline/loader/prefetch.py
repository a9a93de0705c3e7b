"""Fetching ahead of the schedule: requests are looked at before they are due, and what they want is brought."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from feedline.core.dataset import RangesOf

_TRIED = 8
"""A dataset that wants nothing from a cache for so many batches has none."""


_FOUND, _SKIPPED = 4, 15
"""Once nothing was missing for so many batches, so many are skipped between two that are looked at, until something is
missing: batches that follow one another want mostly the same pieces."""


_THREADS = 16


class PeekableIterator:
    """The requests of an iterator, in order, some of which were seen before their turn. Thread-safe.

    What the iterator raises is raised when its turn has come.
    """

    def __init__(self, requests: Iterator[Any]) -> None:
        self._requests = requests
        self._lock = threading.Lock()
        self._seen: deque[Any] = deque()
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.taken()[0]

    def taken(self) -> tuple[Any, bool]:
        """The next request, and whether it was seen before; StopIteration at the end."""
        with self._lock:
            if self._seen:
                return self._seen.popleft(), True
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            return next(self._requests), False

    def further(self) -> Any:
        """The first request that nobody has seen, which stays due; None at the end."""
        with self._lock:
            if self._error is not None:
                return None
            try:
                request = next(self._requests)
            except StopIteration:
                return None
            except Exception as error:  # noqa: BLE001 - raised when its turn comes
                self._error = error
                return None
            self._seen.append(request)
            return request


class PrefetchingRequests:
    """An iterator of requests that has threads fetch, into the caches of the dataset, what later ones want.

    They begin once the first request was asked for.
    """

    def __init__(self, requests: Iterator[Any], ranges: RangesOf) -> None:
        self._lookahead, self._ranges = PeekableIterator(requests), ranges
        prefetch = import_module("feedline.stores.cache.prefetch")  # only datasets with stores come here
        self._orders = prefetch.Prefetcher(self._drawn(), ahead_nbytes=1, threads=_THREADS)
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        request, seen = self._lookahead.taken()
        if not self._begun:  # not before: the sampler draws its order with the first request, in the thread that asks
            self._begun = True
            self._orders.start()
        if seen:
            self._orders.advance()
        return request

    def close(self) -> None:
        """Fetch nothing more."""
        self._orders.stop()

    def _drawn(self) -> Iterator[list[tuple[Any, Any]]]:
        """What each further request wants; ends where a dataset turns out to want nothing from any cache."""
        idle = skipped = 0
        while idle < _TRIED and (request := self._lookahead.further()) is not None:
            if not idle and skipped < _SKIPPED and self._orders.found >= _FOUND:
                skipped += 1
                yield []
                continue
            skipped = 0
            order = self._order(request.indices)
            if order:
                self._orders.limit_nbytes = max(store.cache.ahead_nbytes for store, _ in order)
            idle = 0 if order else idle + 1
            yield order

    def _order(self, indices: Any) -> list[tuple[Any, Any]]:
        try:
            wanted = self._ranges(np.atleast_1d(np.asarray(indices, np.int64)))
        except Exception:  # noqa: BLE001 - whoever reads the sample meets the error, and is told about it
            return []
        return [(store, want) for store, want in wanted if store.cache.ahead_nbytes]
