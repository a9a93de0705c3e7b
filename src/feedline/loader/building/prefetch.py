"""Prefetching of object ranges for requests that are not due yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from feedline.core.dataset import RangesOf

_TRIED = 8
"""Prefetching ends after this many batches without ranges of a cached store."""


_FOUND, _SKIPPED = 4, 15
"""After `_FOUND` batches with all ranges in the cache, only one batch in `_SKIPPED` + 1 is checked, until a range is
missing. Consecutive batches mostly need the same blocks.
"""


_THREADS = 16


class PeekableIterator:
    """Iterator whose items can be read before they are due. Thread-safe.

    An exception of the wrapped iterator is raised when its item is due.
    """

    def __init__(self, requests: Iterator[Any]) -> None:
        self._requests = requests
        self._lock = threading.Lock()
        self._seen: deque[Any] = deque()
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.pop()[0]

    def pop(self) -> tuple[Any, bool]:
        """The next request, and True if it was peeked before."""
        with self._lock:
            if self._seen:
                return self._seen.popleft(), True
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            return next(self._requests), False

    def peek_next(self) -> Any:
        """The first request not peeked yet; None at the end."""
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
    """Iterator of requests that prefetches ranges of later ones in threads.

    The ranges go into the caches of the stores. The threads start with the first request.
    """

    def __init__(self, requests: Iterator[Any], ranges: RangesOf) -> None:
        self._peekable, self._ranges = PeekableIterator(requests), ranges
        prefetch = import_module("feedline.stores.cache.prefetch")  # only datasets with stores come here
        self._prefetcher = prefetch.Prefetcher(self._items(), ahead_nbytes=1, threads=_THREADS)
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        request, seen = self._peekable.pop()
        if not self._begun:  # not earlier: the sampler must draw its order in the calling thread
            self._begun = True
            self._prefetcher.start()
        if seen:
            self._prefetcher.advance()
        return request

    def close(self) -> None:
        """Stop prefetching."""
        self._prefetcher.stop()

    def _items(self) -> Iterator[list[tuple[Any, Any]]]:
        """Ranges of each later request; ends after `_TRIED` requests without any."""
        idle = skipped = 0
        while idle < _TRIED and (request := self._peekable.peek_next()) is not None:
            if not idle and skipped < _SKIPPED and self._prefetcher.found >= _FOUND:
                skipped += 1
                yield []
                continue
            skipped = 0
            item = self._item(request.indices)
            if item:
                self._prefetcher.limit_nbytes = max(store.cache.ahead_nbytes for store, _ in item)
            idle = 0 if item else idle + 1
            yield item

    def _item(self, indices: Any) -> list[tuple[Any, Any]]:
        try:
            ranges = self._ranges(np.atleast_1d(np.asarray(indices, np.int64)))
        except Exception:  # noqa: BLE001 - reading the sample raises the same error
            return []
        return [(store, part) for store, part in ranges if store.cache.ahead_nbytes]
