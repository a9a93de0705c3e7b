"""Spans land in the recording of their own thread, and only there."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic_ns

import pytest

from feedline.core import telemetry
from feedline.core.telemetry import MAIN, Span, recording, span, work_as


@pytest.fixture(autouse=True)
def main_worker() -> Iterator[None]:
    yield
    work_as(MAIN)


def test_a_span_times_its_block() -> None:
    before = monotonic_ns()
    with recording() as spans, span("fetch"):
        inside = monotonic_ns()
    after = monotonic_ns()
    (only,) = spans
    assert only.stage == "fetch"
    assert only.worker == MAIN
    assert before <= only.start_ns <= inside <= only.stop_ns <= after


def test_spans_come_in_the_order_in_which_they_end() -> None:
    with recording() as spans, span("outer"):
        with span("first"):
            pass
        with span("second"):
            pass
    assert [s.stage for s in spans] == ["first", "second", "outer"]


def test_a_span_is_kept_when_its_block_fails() -> None:
    with recording() as spans, pytest.raises(KeyError), span("collate"):
        raise KeyError
    assert [s.stage for s in spans] == ["collate"]


def test_outside_a_recording_nothing_is_kept() -> None:
    with span("lost"):
        pass
    with recording() as spans:
        pass
    with span("late"):
        pass
    assert spans == []


def test_recordings_nest_and_the_outer_one_goes_on() -> None:
    with recording() as outer:
        with recording() as inner, span("inner"):
            pass
        with span("outer"):
            pass
    assert [s.stage for s in inner] == ["inner"]
    assert [s.stage for s in outer] == ["outer"]


def test_a_recording_ends_with_its_block_even_on_error() -> None:
    with pytest.raises(KeyError), recording() as spans:
        raise KeyError
    with span("after"):
        pass
    assert spans == []


def test_each_thread_has_its_own_recording_and_worker() -> None:
    found: dict[int, list[Span]] = {}
    together = threading.Barrier(2)

    def work(worker: int) -> None:
        work_as(worker)
        with recording() as spans:
            together.wait()
            with span(f"stage {worker}"):
                pass
            together.wait()
        found[worker] = spans

    threads = [threading.Thread(target=work, args=(worker,)) for worker in (0, 1)]
    with recording() as ours:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ours == []
    assert {worker: [(s.stage, s.worker) for s in spans] for worker, spans in found.items()} == {
        0: [("stage 0", 0)],
        1: [("stage 1", 1)],
    }


def test_spans_travel() -> None:
    original = Span("decode", 1, 2, 3)
    assert pickle.loads(pickle.dumps(original)) == original


def in_new_thread(function: Callable[[], None]) -> None:
    """Run in a thread of its own, whose clocks have not been read."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_cpu_time_is_measured_at_most_once_in_a_while() -> None:
    def measure() -> None:
        now = monotonic_ns()
        started = telemetry.start_cpu(now)
        assert started is not None
        assert telemetry.start_cpu(now + telemetry.CPU_EVERY_NS - 1) is None
        (stage, start_ns, stop_ns, worker), clock = telemetry.spent_cpu("fetch", started)
        assert (stage, start_ns, stop_ns, worker) == ("fetch.cpu", started, clock, MAIN)
        assert clock >= started
        assert telemetry.start_cpu(now + telemetry.CPU_EVERY_NS) is not None

    in_new_thread(measure)


def test_run_delay_grows_and_is_read_at_most_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = iter([100, 130, 130])
    monkeypatch.setattr(telemetry, "_run_delay_ns", lambda: next(delays))

    def measure() -> None:
        spans: list[telemetry.SpanTuple] = []
        for tick in range(3):
            telemetry.add_run_delay(spans, (tick + 1) * telemetry.RUN_DELAY_EVERY_NS)
            telemetry.add_run_delay(spans, (tick + 2) * telemetry.RUN_DELAY_EVERY_NS - 1)
        assert spans == [("run_delay", 100, 130, MAIN), ("run_delay", 130, 130, MAIN)]

    in_new_thread(measure)


def test_a_kernel_without_run_delays_gives_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_run_delay_ns", lambda: -1)

    def measure() -> None:
        spans: list[telemetry.SpanTuple] = []
        for tick in range(3):
            telemetry.add_run_delay(spans, (tick + 1) * telemetry.RUN_DELAY_EVERY_NS)
        assert spans == []

    in_new_thread(measure)
