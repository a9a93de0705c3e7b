"""Requests: ranges coalesced, sent concurrently, and hedged when slow."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from typing import NamedTuple, Self, TypeVar

from feedline.core.caches import PerProcess
from feedline.core.stage_parts import read_part
from feedline.core.store_metrics import count
from feedline.core.threads import WAKE_S, CancelScope, DaemonPool, WaitCancelledError, check_not_cancelled
from feedline.errors import ArgumentError, RangeError
from feedline.stores.base import ByteRange, Range
from feedline.stores.concurrency import ConcurrencyLimit
from feedline.stores.retry import Clock, SystemClock


@dataclass(frozen=True, slots=True)
class Requests:
    """Limits for turning ranges into requests."""

    max_concurrent: int = 64
    """Most requests in flight, per store and process; the limit is lower while most requests fail together."""
    gap_nbytes: int = 128 << 10
    """Most bytes between two ranges of one object that share a request; the bytes between them are discarded."""
    max_nbytes: int = 8 << 20
    """Ranges are not joined beyond this size, and a longer range is read by several requests at once."""

    def __post_init__(self) -> None:
        if self.max_concurrent < 1 or self.gap_nbytes < 0 or self.max_nbytes < 1:
            raise ArgumentError(f"{self}: max_concurrent and max_nbytes must be at least 1, gap_nbytes at least 0")


def spans_for(ranges: Sequence[tuple[int, int]], requests: Requests) -> list[ByteRange]:
    """Coalesce ranges into the spans to request, sorted by start.

    Every range is within one span, or is the concatenation of several spans.
    """
    spans: list[ByteRange] = []
    for start, stop in sorted({(start, stop) for start, stop in ranges if start < stop}):
        if spans and _joins(spans[-1], start, stop, requests):
            spans[-1] = ByteRange(spans[-1].start, max(spans[-1].stop, stop))
        else:
            spans.append(ByteRange(start, stop))
    return [part for span in spans for part in _parts(span, requests.max_nbytes)]


def are_many(ranges: Sequence[tuple[int, int]], requests: Requests) -> bool:
    """True if ranges take more requests than are sent at once.

    Then the object's size is requested before memory is allocated: a wrong index can request exabytes.
    """
    return sum(stop - start for start, stop in ranges) > requests.max_concurrent * requests.max_nbytes


def check_ranges(ranges: Sequence[tuple[int, int]], what: str) -> None:
    """Raise ArgumentError for a negative range or a negative start."""
    for start, stop in ranges:
        if not 0 <= start <= stop:
            raise ArgumentError(f"{what}: bytes [{start}, {stop}) are not a valid range: give 0 <= start <= stop")


def check_within(ranges: Sequence[tuple[int, int]], size: int, what: str) -> None:
    """Raise RangeError for a range that reaches past the end."""
    for start, stop in ranges:
        if stop > size:
            raise RangeError(f"{what}, bytes [{start}, {stop}): the object has only {size} bytes")


def _joins(span: ByteRange, start: int, stop: int, requests: Requests) -> bool:
    if start < span.stop:
        return True  # overlaps are read once
    return start - span.stop <= requests.gap_nbytes and stop - span.start <= requests.max_nbytes


def _parts(span: ByteRange, largest: int) -> list[ByteRange]:
    """Split a span into equal parts of at most `largest` bytes."""
    count = -(-span.nbytes // largest)
    size = -(-span.nbytes // count)
    return [ByteRange(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size)]


class FetchedRanges:
    """The bytes of some ranges of an object.

    `views[i]` has the bytes of `ranges[i]`; ranges are sorted by start.
    """

    def __init__(self, ranges: Sequence[Range] = (), views: Sequence[memoryview] = ()) -> None:
        self._starts, self._views = [start for start, _ in ranges], views

    @classmethod
    def of(cls, views: Mapping[Range, memoryview]) -> Self:
        """Ranges from a mapping of ranges to bytes, in any order."""
        ranges = sorted(views)
        return cls(ranges, [views[each] for each in ranges])

    def find(self, start: int, stop: int) -> memoryview | None:
        """The bytes from `start` to `stop` if one range has them."""
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return None
        first, view = self._starts[at], self._views[at]
        return view[start - first : stop - first] if stop <= first + len(view) else None

    def cut(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` up to `stop`.

        A view if they are in one range, else a copy from adjacent ranges.
        """
        if start == stop:
            return memoryview(b"")
        if (view := self.find(start, stop)) is not None:
            return view
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, stop, lo=first)
        parts = zip(self._starts[first:last], self._views[first:last], strict=True)
        whole = join_views([view[max(start - at, 0) : stop - at] for at, view in parts])
        assert whole.nbytes == stop - start, f"bytes [{start}, {stop}) were not fetched"
        return whole


def join_views(views: Sequence[memoryview]) -> memoryview:
    """Copy several views into one, end to end; read-only."""
    whole, at = bytearray(sum(view.nbytes for view in views)), 0
    for view in views:
        whole[at : at + view.nbytes] = view
        at += view.nbytes
    return memoryview(whole).toreadonly()


_WINDOW = 128


_MIN_REQUESTS = 20
"""Number of requests of a size that must have ended before a request can count as slow."""


_REFRESH_EVERY = 8
"""Number of requests after which the quantile is computed again."""


_MIN_SLOW_S = 0.02
"""No request faster than this counts as slow: such a time only shows how busy this machine is."""


_SLOW_FACTOR = 2.0
"""A request below this multiple of the median does not count as slow: if all take about the same time, a hedge is
useless.
"""


_HEDGE_SHARE = 0.1


_QUICK_S = 0.5
"""Longest duration of a slow request for which a restart costs less than joining its parts."""


class _SizeClass:
    """The latest requests of about one size."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_WINDOW)
        self.slow_after_s: float | None = None
        self._fresh = 0

    def add(self, seconds: float, quantile: float) -> None:
        self.seconds.append(seconds)
        self._fresh += 1
        if len(self.seconds) >= _MIN_REQUESTS and (self.slow_after_s is None or self._fresh >= _REFRESH_EVERY):
            ranked = sorted(self.seconds)
            typical_s, slow_s = ranked[len(ranked) // 2], ranked[min(int(len(ranked) * quantile), len(ranked) - 1)]
            self.slow_after_s = max(_MIN_SLOW_S, _SLOW_FACTOR * typical_s, slow_s)
            self._fresh = 0


class Latencies:
    """Recent durations of requests by size. Safe to use from several threads."""

    def __init__(self, quantile: float | None) -> None:
        self._quantile = quantile
        self._lock = threading.Lock()
        self._sizes: dict[int, _SizeClass] = {}
        self._sent = self._hedged = 0

    def add(self, nbytes: int, seconds: float) -> None:
        """Record the duration of a request."""
        if self._quantile is not None:
            with self._lock:
                self._sent += 1
                self._sizes.setdefault(nbytes.bit_length(), _SizeClass()).add(seconds, self._quantile)

    def slow_after_s(self, nbytes: int) -> float | None:
        """The duration from which on such a request counts as slow.

        None if it is not known yet, or if hedging is off.
        """
        size = self._sizes.get(nbytes.bit_length())
        return None if size is None else size.slow_after_s

    def is_quick(self, nbytes: int) -> bool:
        """True if such requests are known to take little time."""
        slow_after_s = self.slow_after_s(nbytes)
        return slow_after_s is not None and slow_after_s < _QUICK_S

    def may_hedge(self) -> bool:
        """Take a second request from the budget; False if none is left.

        The budget has one for ten ordinary requests.
        """
        with self._lock:
            affordable = self._hedged < self._sent * _HEDGE_SHARE
            self._hedged += affordable
            return affordable


T = TypeVar("T")


_HEDGES_AT_ONCE = 4
"""Few, because more requests do not help a store that is slow for all requests."""


@dataclass(slots=True, eq=False)
class Flight:
    """One span in flight.

    The request sets `throttled` when the server asks for fewer requests.
    """

    number: int
    span: ByteRange
    throttled: bool = False
    started_s: float | None = None
    copies: int = 1
    hedged: bool = False
    is_quick: bool = False
    """True if recent requests of this size were fast, so that a copy may restart from its first byte."""
    has_arrived: bool = False
    """True once one copy has arrived: the other is no longer needed."""

    def check(self) -> None:
        """Raise WaitCancelledError if nothing waits for the data any more."""
        check_not_cancelled()
        if self.has_arrived:
            raise WaitCancelledError("another request for the same bytes came first")


Fetch = Callable[[Flight], memoryview]


class _Arrival(NamedTuple):
    flight: Flight
    hedge: bool
    data: memoryview | None
    error: BaseException | None


class _Pools:
    def __init__(self, max_concurrent: int) -> None:
        self.ordinary = DaemonPool(max_concurrent, "feedline-store")
        # Separate threads: a second request that waits for ordinary ones would be too late.
        self.hedges = DaemonPool(_HEDGES_AT_ONCE, "feedline-hedge")


class Transfers:
    """The threads of one store.

    They end when idle, and when it is dropped. Safe to use from several threads, and after a fork.
    """

    def __init__(
        self, max_concurrent: int, hedge_quantile: float | None, clock: Clock | None = None, *, url: str = "a store"
    ) -> None:
        self._clock, self._url = clock or SystemClock(), url
        self._pools = PerProcess(lambda: _Pools(max_concurrent))
        self.limit = PerProcess(lambda: ConcurrencyLimit(max_concurrent))
        self._latencies = PerProcess(lambda: Latencies(hedge_quantile))

    def run(self, fetch: Fetch, spans: Sequence[ByteRange]) -> list[memoryview]:
        """Call `fetch` for each span concurrently; the first failure is raised.

        After the call, even a failed one, only requests that were already sent still wait for the store.
        """
        run = _SupervisedCall(fetch, self._clock, self._latencies(), self._pools(), self.limit())
        with read_part(self._url):
            return run.results(spans)

    def read(self, fetch: Fetch, ranges: Sequence[Range], requests: Requests) -> list[memoryview]:
        """One view for each range.

        Ranges that are close together share a call of `fetch` and its memory.
        """
        spans = spans_for(ranges, requests)
        fetched = FetchedRanges(spans, self.run(fetch, spans))
        return [fetched.cut(start, stop) for start, stop in ranges]

    def call(self, ask: Callable[[], T]) -> T:
        """Call `ask` in a thread.

        Ctrl-C and `CancelScope.cancel` end the wait for it.
        """
        with read_part(self._url):
            return self._pools().ordinary.call(ask)


class _SupervisedCall:
    """One call, supervised by the thread that made it."""

    def __init__(
        self, fetch: Fetch, clock: Clock, latencies: Latencies, pools: _Pools, limit: ConcurrencyLimit
    ) -> None:
        self._fetch = fetch
        self._limit = limit
        self._clock = clock
        self._latencies = latencies
        self._pools = pools
        self._arrivals: SimpleQueue[_Arrival | None] = SimpleQueue()
        self._pending: dict[int, Flight] = {}

    def results(self, spans: Sequence[ByteRange]) -> list[memoryview]:
        self._pending = {number: Flight(number, span) for number, span in enumerate(spans)}
        results: dict[int, memoryview] = {}
        with CancelScope() as scope:
            scope.add(lambda: self._arrivals.put(None))
            for flight in self._pending.values():
                self._pools.ordinary.submit(self._send, flight)
            while self._pending:
                results.update(self._next_result())
        return [results[number] for number in range(len(spans))]

    def _next_result(self) -> dict[int, memoryview]:
        """The next result, if it is still needed.

        If nothing arrives before a request becomes slow, that request is sent again.
        """
        try:
            arrival = self._arrivals.get(timeout=min(self._until_slow_s(), WAKE_S))
        except Empty:
            self._send_hedges()
            return {}
        if arrival is None:
            raise WaitCancelledError("the wait was canceled: its result is no longer needed")
        flight, hedge, data, error = arrival
        flight.copies -= 1
        if flight.number not in self._pending or (error is not None and flight.copies):
            return {}  # the other copy arrived first, or may still arrive
        if error is not None:
            raise error
        assert data is not None
        # The other copy stops at its next part and closes its connection: its remaining bytes are not needed.
        flight.has_arrived = True
        del self._pending[flight.number]
        count(hedges_won=hedge)
        return {flight.number: data}

    def _send(self, flight: Flight, hedge: bool = False) -> None:
        start_s = self._clock.now()
        if not hedge:
            flight.started_s = start_s
            flight.is_quick = self._latencies.is_quick(flight.span.nbytes)
        try:
            data = self._fetch(flight)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for it
            self._arrivals.put(_Arrival(flight, hedge, None, error))
        else:
            self._latencies.add(flight.span.nbytes, self._clock.now() - start_s)
            self._arrivals.put(_Arrival(flight, hedge, data, None))

    def _hedge_candidates(self) -> Iterator[tuple[Flight, float]]:
        """Flights not yet hedged, and when each becomes slow."""
        if self._limit.is_lowered:  # the line is full: second requests would slow the others down
            return
        now = self._clock.now()
        for flight in self._pending.values():
            slow_after_s = self._latencies.slow_after_s(flight.span.nbytes)
            # A throttled request is never hedged: the server asks for fewer requests, not for more.
            if slow_after_s is not None and not flight.hedged and not flight.throttled:
                yield flight, (now if flight.started_s is None else flight.started_s) + slow_after_s
            if flight.started_s is None:
                return  # threads take flights in this order: later flights have not started, either

    def _until_slow_s(self) -> float:
        moments = [moment for _, moment in self._hedge_candidates()]
        return max(0.0, min(moments, default=inf) - self._clock.now())

    def _send_hedges(self) -> None:
        now = self._clock.now()
        for flight in [flight for flight, moment in self._hedge_candidates() if moment <= now]:
            flight.hedged = True
            if self._latencies.may_hedge():
                flight.copies += 1
                count(hedges=1)
                self._pools.hedges.submit(self._send, flight, True)
