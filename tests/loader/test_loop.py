"""The loop, over a pool whose results the test releases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import pytest

from feedline.core.batch import EMPTY_BATCH, BatchResult, SkippedSample
from feedline.core.cursor import Cursor
from feedline.core.schedule import BatchRequest
from feedline.errors import ErrorLimitError
from feedline.loader.error_policy import ErrorPolicy, Quarantine
from feedline.loader.loop import Iteration
from feedline.loader.progress import Progress
from feedline.loader.report import Totals
from feedline.loader.window import FlowControl
from feedline.workers.base import PoolStatistics


class FakeTicket:
    def __init__(self, request: BatchRequest, outcome: Any) -> None:
        self.request, self.outcome = request, outcome
        self.ready = self.cancelled = False

    def done(self) -> bool:
        return self.ready

    def result(self) -> BatchResult:
        self.ready = True
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome if isinstance(self.outcome, BatchResult) else BatchResult(self.outcome, [])

    def cancel(self) -> None:
        self.cancelled = True


class FakePool:
    """Answers each request with its number, or with the entry of `outcomes`."""

    def __init__(self, outcomes: dict[int, Any] | None = None) -> None:
        self.outcomes = outcomes or {}
        self.tickets: list[FakeTicket] = []
        self.sizes: list[int] = []

    @property
    def processes(self) -> list[Any]:
        return []

    def submit(self, request: BatchRequest) -> FakeTicket:
        ticket = FakeTicket(request, self.outcomes.get(request.number, request.number))
        self.tickets.append(ticket)
        return ticket

    def wait_any(self, tickets: Iterable[FakeTicket]) -> FakeTicket:
        tickets = list(tickets)
        return next((ticket for ticket in tickets if ticket.ready), tickets[0])

    def resize(self, num_workers: int) -> None:
        self.sizes.append(num_workers)

    def statistics(self) -> PoolStatistics:
        return PoolStatistics()

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class FakeStage:
    """Marks batches; has room for two."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.finished = 0
        self.closed = False

    def start(self, batch: Any) -> Any:
        self.started.append(batch)
        return ("moving", batch)

    def finish(self, moving: Any) -> Any:
        self.finished += 1
        return ("moved", moving[1])

    def has_room(self) -> bool:
        return len(self.started) - self.finished < 2

    def statistics(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


def requests(count: int) -> Iterator[BatchRequest]:
    for number in range(count):
        start = number * 2
        yield BatchRequest(0, number, start, start + 2, np.arange(start, start + 2), range(start, start + 2), None)


def progress(policy: ErrorPolicy | None = None) -> Progress:
    return Progress(Cursor(), Quarantine(policy or ErrorPolicy()), Totals())


def test_batches_come_in_order_and_the_cursor_moves_with_them() -> None:
    mine = progress()
    positions = []
    for number, batch in enumerate(Iteration(requests(4), FakePool(), mine, FlowControl(ahead=3))):
        assert batch == number
        positions.append(mine.cursor.position)
    assert positions == [2, 4, 6, 8]
    assert (mine.cursor, mine.is_over) == (Cursor(1), True)
    assert mine.totals.samples == 8


def test_no_more_requests_than_allowed_are_in_flight_while_the_loop_computes() -> None:
    pool = FakePool()
    iteration = Iteration(requests(10), pool, progress(), FlowControl(ahead=3))
    iteration.start()
    assert len(pool.tickets) == 3
    next(iteration)
    assert len(pool.tickets) == 4


def test_nothing_is_requested_ahead_without_workers() -> None:
    pool = FakePool()
    iteration = Iteration(requests(10), pool, progress(), FlowControl(ahead=0))
    next(iteration)
    assert len(pool.tickets) == 1


def test_a_failed_batch_is_raised_in_its_turn_and_stays_undelivered() -> None:
    mine = progress()
    iteration = Iteration(requests(4), FakePool({1: KeyError("bad")}), mine, FlowControl(ahead=2))
    assert next(iteration) == 0
    with pytest.raises(KeyError):
        next(iteration)
    assert mine.cursor == Cursor(0, 2)
    assert list(iteration) == [2, 3]


def test_the_gap_of_a_failed_batch_is_in_the_state_until_the_epoch_ends() -> None:
    mine = progress()
    iteration = Iteration(requests(4), FakePool({1: KeyError("bad")}), mine, FlowControl(ahead=2))
    next(iteration)
    with pytest.raises(KeyError):
        next(iteration)
    next(iteration)
    assert mine.cursor == Cursor(0, 2, ((4, 6),))


def test_an_error_of_the_sampler_waits_for_the_batches_before_it() -> None:
    def broken() -> Iterator[BatchRequest]:
        yield from requests(2)
        raise OSError("sampler")

    iteration = Iteration(broken(), FakePool(), progress(), FlowControl(ahead=5))
    assert [next(iteration), next(iteration)] == [0, 1]
    with pytest.raises(OSError, match="sampler"):
        next(iteration)


def test_out_of_order_delivery_takes_the_first_that_is_done() -> None:
    pool, mine = FakePool(), progress()
    iteration = Iteration(requests(3), pool, mine, FlowControl(ahead=3, in_order=False))
    iteration.start()
    pool.tickets[2].ready = True
    assert next(iteration) == 2
    assert mine.cursor == Cursor(0, 0, ((4, 6),))
    assert sorted(iteration) == [0, 1]


def test_an_empty_batch_counts_as_delivered_but_is_not_returned() -> None:
    mine = progress()
    skipped = (SkippedSample(0, 2, 7, "ValueError: bad"), SkippedSample(0, 3, 8, "ValueError: bad"))
    iteration = Iteration(requests(3), FakePool({1: BatchResult(EMPTY_BATCH, [], skipped)}), mine, FlowControl(ahead=2))
    assert list(iteration) == [0, 2]
    assert mine.quarantine.count == 2
    assert mine.totals.samples == 4


def test_too_many_failed_samples_end_the_loop() -> None:
    skipped = (SkippedSample(0, 2, 7, "ValueError: bad"),)
    iteration = Iteration(
        requests(3), FakePool({1: BatchResult(1, [], skipped)}), progress(ErrorPolicy(limit=0)), FlowControl()
    )
    assert next(iteration) == 0
    with pytest.raises(ErrorLimitError, match="index 7"):
        next(iteration)


def test_stages_start_what_is_ready_ahead_and_no_more_than_has_room() -> None:
    pool, stage = FakePool(), FakeStage()
    iteration = Iteration(requests(6), pool, progress(), FlowControl(ahead=4), stage=stage)
    iteration.start()
    for ticket in pool.tickets:
        ticket.ready = True
    assert next(iteration) == ("moved", 0)
    assert stage.started == [0, 1]
    assert [batch for _, batch in iteration] == [1, 2, 3, 4, 5]
    assert stage.closed


def test_an_error_met_by_a_stage_ahead_waits_for_its_turn() -> None:
    pool, stage = FakePool({1: KeyError("bad")}), FakeStage()
    iteration = Iteration(requests(3), pool, progress(), FlowControl(ahead=3), stage=stage)
    iteration.start()
    for ticket in pool.tickets:
        ticket.ready = True
    assert next(iteration) == ("moved", 0)
    with pytest.raises(KeyError):
        next(iteration)
    assert next(iteration) == ("moved", 2)


def test_closing_cancels_what_is_in_flight_once() -> None:
    pool, closed = FakePool(), []
    iteration = Iteration(requests(9), pool, progress(), FlowControl(ahead=3), on_close=lambda: closed.append(1))
    next(iteration)
    del iteration
    assert [ticket.cancelled for ticket in pool.tickets] == [False, True, True, True]
    assert closed == [1]
