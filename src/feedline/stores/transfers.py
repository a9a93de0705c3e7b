"""Many requests at once, the slow ones asked for twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from feedline.cancelling import WAKE_S, CancelScope, DaemonPool, WaitCancelledError
from feedline.per_process import PerProcess
from feedline.store_counts import count
from feedline.stores.hedging import Latencies
from feedline.stores.protocol import Span
from feedline.stores.retry import Clock, SystemClock

T = TypeVar("T")

_HEDGES_AT_ONCE = 4


@dataclass(slots=True, eq=False)
class Flight:
    """One span on its way. `told_to_wait` is set by the request when the server asks for fewer of them."""

    number: int
    span: Span
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

    def run(self, fetch: Fetch, spans: Sequence[Span]) -> list[memoryview]:
        """`fetch` of each span, many at once; the first failure is raised.

        However it ends, nothing goes on waiting for the store but requests that are already sent.
        """
        run = _Run(fetch, self._clock, self._latencies(), self._pools())
        return run.results(spans)

    def call(self, ask: Callable[[], T]) -> T:
        """What one request gives; a wait for it that Ctrl-C and `CancelScope.cancel` end."""
        return self._pools().ordinary.call(ask)


class _Run:
    """One call, supervised by the thread that made it."""

    def __init__(self, fetch: Fetch, clock: Clock, latencies: Latencies, pools: _Pools) -> None:
        self._fetch = fetch
        self._clock = clock
        self._latencies = latencies
        self._pools = pools
        self._arrivals: SimpleQueue[_Arrival | None] = SimpleQueue()
        self._pending: dict[int, Flight] = {}

    def results(self, spans: Sequence[Span]) -> list[memoryview]:
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
