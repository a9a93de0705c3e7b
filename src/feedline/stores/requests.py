"""Near ranges become one request, far and large ones many.

Many requests at once, the slow ones asked for twice.

When a request is slow enough to be sent a second time.
"""

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
from feedline.core.store_metrics import count
from feedline.core.threads import WAKE_S, CancelScope, DaemonPool, WaitCancelledError
from feedline.errors import ArgumentError, RangeError
from feedline.stores.base import ByteRange, Range
from feedline.stores.retry import Clock, SystemClock


@dataclass(frozen=True, slots=True)
class Requests:
    """How ranges become requests."""

    at_once: int = 64
    """Requests in flight, for each store and process."""
    gap_nbytes: int = 128 << 10
    """Ranges of one object that are at most this far apart are read by one request, and the gap is thrown away."""
    largest_nbytes: int = 8 << 20
    """Ranges are not joined beyond this size, and a longer range is read by several requests at once."""

    def __post_init__(self) -> None:
        if self.at_once < 1 or self.gap_nbytes < 0 or self.largest_nbytes < 1:
            raise ArgumentError(f"{self}: at_once and largest_nbytes are at least 1, gap_nbytes at least 0")


def spans_for(ranges: Sequence[tuple[int, int]], requests: Requests) -> list[ByteRange]:
    """What to ask for so that every range lies within one span, or is the concatenation of several; sorted by start."""
    spans: list[ByteRange] = []
    for start, stop in sorted({(start, stop) for start, stop in ranges if start < stop}):
        if spans and _joins(spans[-1], start, stop, requests):
            spans[-1] = ByteRange(spans[-1].start, max(spans[-1].stop, stop))
        else:
            spans.append(ByteRange(start, stop))
    return [part for span in spans for part in _parts(span, requests.largest_nbytes)]


def are_many(ranges: Sequence[tuple[int, int]], requests: Requests) -> bool:
    """Whether they take more requests than are sent at once: few are, and a wrong index soon asks for exabytes.

    Then the size of the object is worth a request, before anything is made for each of the others.
    """
    return sum(stop - start for start, stop in ranges) > requests.at_once * requests.largest_nbytes


def refuse_backwards(ranges: Sequence[tuple[int, int]], what: str) -> None:
    """ArgumentError for a range that ends before it starts, or starts before the object."""
    for start, stop in ranges:
        if not 0 <= start <= stop:
            raise ArgumentError(f"{what}: bytes [{start}, {stop}) are no range")


def refuse_beyond(ranges: Sequence[tuple[int, int]], size: int, what: str) -> None:
    """RangeError for a range that reaches past the end of an object."""
    for start, stop in ranges:
        if stop > size:
            raise RangeError(f"{what}, bytes [{start}, {stop}): the object has only {size} bytes")


def _joins(span: ByteRange, start: int, stop: int, requests: Requests) -> bool:
    if start < span.stop:
        return True  # what overlaps is read once
    return start - span.stop <= requests.gap_nbytes and stop - span.start <= requests.largest_nbytes


def _parts(span: ByteRange, largest: int) -> list[ByteRange]:
    """Equal parts, none of them larger than `largest`."""
    count = -(-span.nbytes // largest)
    size = -(-span.nbytes // count)
    return [ByteRange(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size)]


class FetchedRanges:
    """The bytes of some ranges of an object: `views[i]` are those of `ranges[i]`, which are in order of their start."""

    def __init__(self, ranges: Sequence[Range] = (), views: Sequence[memoryview] = ()) -> None:
        self._starts, self._views = [start for start, _ in ranges], views

    @classmethod
    def of(cls, views: Mapping[Range, memoryview]) -> Self:
        """Those of a mapping from ranges to their bytes, in any order."""
        ranges = sorted(views)
        return cls(ranges, [views[each] for each in ranges])

    def find(self, start: int, stop: int) -> memoryview | None:
        """The bytes from `start` up to `stop`, if they lie in one of the ranges."""
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return None
        first, view = self._starts[at], self._views[at]
        return view[start - first : stop - first] if stop <= first + len(view) else None

    def cut(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` up to `stop`: a view if they lie in one range, else a copy out of adjacent ones."""
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
    """One read-only copy of several views, end to end."""
    whole, at = bytearray(sum(view.nbytes for view in views)), 0
    for view in views:
        whole[at : at + view.nbytes] = view
        at += view.nbytes
    return memoryview(whole).toreadonly()


_REMEMBERED = 128


_NEEDED = 20
"""So many requests of a size must have been seen before one of them can be called slow."""


_RENEWED = 8
"""The quantile is taken anew after so many more."""


_SHORTEST_S = 0.02
"""Nothing faster than this is slow: it would only measure how busy this machine is."""


_FACTOR = 2.0
"""Nor is what takes less than twice as long as usual: where all take about the same, a second request only costs."""


_SHARE = 0.1


class _Size:
    """The latest requests of about one size."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self.slow_after_s: float | None = None
        self._fresh = 0

    def add(self, seconds: float, quantile: float) -> None:
        self.seconds.append(seconds)
        self._fresh += 1
        if len(self.seconds) >= _NEEDED and (self.slow_after_s is None or self._fresh >= _RENEWED):
            ranked = sorted(self.seconds)
            typical_s, slow_s = ranked[len(ranked) // 2], ranked[min(int(len(ranked) * quantile), len(ranked) - 1)]
            self.slow_after_s = max(_SHORTEST_S, _FACTOR * typical_s, slow_s)
            self._fresh = 0


class Latencies:
    """How long requests took lately, by size. Safe to use from several threads."""

    def __init__(self, quantile: float | None) -> None:
        self._quantile = quantile
        self._lock = threading.Lock()
        self._sizes: dict[int, _Size] = {}
        self._sent = self._hedged = 0

    def add(self, nbytes: int, seconds: float) -> None:
        """A request for so many bytes took so long."""
        if self._quantile is not None:
            with self._lock:
                self._sent += 1
                self._sizes.setdefault(nbytes.bit_length(), _Size()).add(seconds, self._quantile)

    def slow_after_s(self, nbytes: int) -> float | None:
        """A request for so many bytes that takes longer is slow; None if that is not known, or nobody asks."""
        size = self._sizes.get(nbytes.bit_length())
        return None if size is None else size.slow_after_s

    def may_hedge(self) -> bool:
        """Whether a second request can be afforded, one for ten ordinary ones; if so, it is counted."""
        with self._lock:
            affordable = self._hedged < self._sent * _SHARE
            self._hedged += affordable
            return affordable


T = TypeVar("T")


_HEDGES_AT_ONCE = 4


@dataclass(slots=True, eq=False)
class Flight:
    """One span on its way. `told_to_wait` is set by the request when the server asks for fewer of them."""

    number: int
    span: ByteRange
    told_to_wait: bool = False
    started_s: float | None = None
    copies: int = 1
    hedged: bool = False


Fetch = Callable[[Flight], memoryview]


class _Arrival(NamedTuple):
    flight: Flight
    hedge: bool
    data: memoryview | None
    error: BaseException | None


class _Pools:
    def __init__(self, at_once: int) -> None:
        self.ordinary = DaemonPool(at_once, "feedline-store")
        # A second request that queued behind ordinary ones would come too late.
        self.hedges = DaemonPool(_HEDGES_AT_ONCE, "feedline-hedge")


class Transfers:
    """The threads of one store: they end when idle, or when it is dropped. Thread-safe, and usable after a fork."""

    def __init__(self, at_once: int, hedge_quantile: float | None, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._pools = PerProcess(lambda: _Pools(at_once))
        self._latencies = PerProcess(lambda: Latencies(hedge_quantile))

    def run(self, fetch: Fetch, spans: Sequence[ByteRange]) -> list[memoryview]:
        """`fetch` of each span, many at once; the first failure is raised.

        However it ends, nothing goes on waiting for the store but requests that are already sent.
        """
        run = _SupervisedCall(fetch, self._clock, self._latencies(), self._pools())
        return run.results(spans)

    def call(self, ask: Callable[[], T]) -> T:
        """What one request gives; a wait for it that Ctrl-C and `CancelScope.cancel` end."""
        return self._pools().ordinary.call(ask)


class _SupervisedCall:
    """One call, supervised by the thread that made it."""

    def __init__(self, fetch: Fetch, clock: Clock, latencies: Latencies, pools: _Pools) -> None:
        self._fetch = fetch
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
                self._pools.ordinary.submit(self._fly, flight)
            while self._pending:
                results.update(self._land())
        return [results[number] for number in range(len(spans))]

    def _land(self) -> dict[int, memoryview]:
        """What came next, if it was wanted; if nothing came before something became slow, that is sent once more."""
        try:
            arrival = self._arrivals.get(timeout=min(self._until_slow_s(), WAKE_S))
        except Empty:
            self._send_slow_ones_again()
            return {}
        if arrival is None:
            raise WaitCancelledError("nobody waits for it any more")
        flight, hedge, data, error = arrival
        flight.copies -= 1
        if flight.number not in self._pending or (error is not None and flight.copies):
            return {}  # its other copy came first, or may still come
        if error is not None:
            raise error
        assert data is not None
        del self._pending[flight.number]
        count(hedges_won=hedge)
        return {flight.number: data}

    def _fly(self, flight: Flight, hedge: bool = False) -> None:
        start_s = self._clock.now()
        if not hedge:
            flight.started_s = start_s
        try:
            data = self._fetch(flight)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for it
            self._arrivals.put(_Arrival(flight, hedge, None, error))
        else:
            self._latencies.add(flight.span.nbytes, self._clock.now() - start_s)
            self._arrivals.put(_Arrival(flight, hedge, data, None))

    def _candidates(self) -> Iterator[tuple[Flight, float]]:
        """Flights that are not yet sent twice, and the moment from which each is slow."""
        now = self._clock.now()
        for flight in self._pending.values():
            slow_after_s = self._latencies.slow_after_s(flight.span.nbytes)
            if slow_after_s is not None and not flight.hedged and not flight.told_to_wait:
                yield flight, (now if flight.started_s is None else flight.started_s) + slow_after_s
            if flight.started_s is None:
                return  # threads take flights in this order: those behind have not started either

    def _until_slow_s(self) -> float:
        moments = [moment for _, moment in self._candidates()]
        return max(0.0, min(moments, default=inf) - self._clock.now())

    def _send_slow_ones_again(self) -> None:
        now = self._clock.now()
        for flight in [flight for flight, moment in self._candidates() if moment <= now]:
            flight.hedged = True
            if self._latencies.may_hedge():
                flight.copies += 1
                count(hedges=1)
                self._pools.hedges.submit(self._fly, flight, True)
