"""Spans land in the recording of their own thread, and only there."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic_ns, process_time_ns, thread_time_ns

import pytest

from feedline.core import telemetry
from feedline.core.telemetry import (
    MAIN,
    Recorder,
    Span,
    SpanTuple,
    new_recorder,
    recorder_of_thread,
    set_worker,
)


@pytest.fixture(autouse=True)
def main_worker() -> Iterator[None]:
    yield
    set_worker(MAIN)


def test_each_thread_has_its_own_batch_and_worker() -> None:
    found: dict[int, list[SpanTuple]] = {}
    together = threading.Barrier(2)

    def work(worker: int) -> None:
        set_worker(worker)
        recorder = recorder_of_thread()
        outer = recorder.begin()
        together.wait()
        recorder.end(f"stage {worker}")
        together.wait()
        found[worker] = recorder.finish("last", outer)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in (0, 1)]
    before = recorder_of_thread().spans
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder_of_thread().spans is before
    for worker, spans in found.items():
        own = {stage: by for stage, _, _, by in spans if not stage.endswith((".cpu", "run_delay", "lock"))}
        assert own == {f"stage {worker}": worker, "last": worker}


def test_spans_travel() -> None:
    original = Span("decode", 1, 2, 3)
    assert pickle.loads(pickle.dumps(original)) == original


def in_new_thread(function: Callable[[], None]) -> None:
    """Run in a thread of its own, whose clocks have not been read."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


RECORDERS = [Recorder, new_recorder]
"""In Python, and the native one."""


@pytest.mark.parametrize("new", RECORDERS)
def test_a_batch_is_a_list_of_spans_one_after_the_other(new: Callable[[], Recorder]) -> None:
    recorder = new()
    recorder.next_cpu_ns = recorder.next_delay_ns = 1 << 62
    recorder.worker = 3
    before = monotonic_ns()
    outer = recorder.begin()
    recorder.end("fetch")
    spans = recorder.finish("collate", outer)
    after = monotonic_ns()
    assert [(stage, worker) for stage, _, _, worker in spans] == [("fetch", 3), ("collate", 3)]
    assert before <= spans[0][1] <= spans[0][2] == spans[1][1] <= spans[1][2] <= after
    assert recorder.spans is None


@pytest.mark.parametrize("new", RECORDERS)
def test_batches_nest(new: Callable[[], Recorder]) -> None:
    recorder = new()
    recorder.next_cpu_ns = recorder.next_delay_ns = 1 << 62
    recorder.begin()
    outer = recorder.begin()
    assert [stage for stage, *_ in recorder.finish("inner", outer)] == ["inner"]
    assert [stage for stage, *_ in recorder.finish("outer", None)] == ["outer"]


@pytest.mark.parametrize("new", RECORDERS)
@pytest.mark.parametrize("own_process", [False, True])
def test_cpu_time_is_measured_at_most_once_in_a_while(new: Callable[[], Recorder], own_process: bool) -> None:
    recorder = new()
    recorder.own_process = own_process
    recorder.next_delay_ns = 1 << 62
    clock = process_time_ns if own_process else thread_time_ns
    before = clock()
    recorder.begin()
    started = recorder.next_cpu_ns - telemetry.CPU_EVERY_NS
    recorder.end("fetch")
    spans = recorder.finish("collate", None)
    assert [stage for stage, *_ in spans] == ["fetch.cpu", "fetch", "collate.cpu", "collate"]
    assert spans[1][1] == started
    assert before <= spans[0][1] <= spans[0][2] == spans[2][1] <= spans[2][2] <= clock()
    recorder.next_cpu_ns = 1 << 62
    recorder.begin()
    assert [stage for stage, *_ in recorder.finish("fetch", None)] == ["fetch"]


@pytest.mark.parametrize("new", RECORDERS)
def test_a_batch_reads_the_run_delay_when_it_is_due(
    new: Callable[[], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = iter([100, 130])
    monkeypatch.setattr(telemetry, "run_delay_ns", lambda: next(delays))

    def measure() -> None:
        recorder = telemetry._threads.recorder = new()
        found = []
        for due in (True, False, True):
            recorder.next_delay_ns = 0 if due else 1 << 62
            recorder.begin()
            found.append([timed for timed in recorder.finish("fetch", None) if timed[0] == telemetry.RUN_DELAY])
        assert found == [[], [], [("run_delay", 100, 130, MAIN)]]

    in_new_thread(measure)


def test_run_delay_grows_and_is_read_at_most_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = iter([100, 130, 130])
    monkeypatch.setattr(telemetry, "run_delay_ns", lambda: next(delays))

    def measure() -> None:
        spans: list[telemetry.SpanTuple] = []
        for tick in range(3):
            telemetry.add_run_delay(spans, (tick + 1) * telemetry.RUN_DELAY_EVERY_NS)
            telemetry.add_run_delay(spans, (tick + 2) * telemetry.RUN_DELAY_EVERY_NS - 1)
        delayed = [timed for timed in spans if timed[0] == telemetry.RUN_DELAY]
        assert delayed == [("run_delay", 100, 130, MAIN), ("run_delay", 130, 130, MAIN)]
        assert len(spans) == 2 * len(delayed), "bytes are read at the same moments"

    in_new_thread(measure)


@pytest.mark.parametrize("own_process", [False, True])
@pytest.mark.parametrize("new", RECORDERS)
def test_the_bytes_that_a_worker_reads_are_counted(
    new: Callable[[], Recorder], own_process: bool, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))

    def measure() -> None:
        recorder = telemetry._threads.recorder = new()
        recorder.own_process = own_process
        found = []
        for due in (True, False, True):
            recorder.next_delay_ns = 0 if due else 1 << 62
            recorder.begin()
            path.read_bytes()
            in_new_thread(path.read_bytes)
            found.append([timed for timed in recorder.finish("fetch", None) if timed[0] == "files.nbytes"])
        assert found[:2] == [[], []]
        ((_, before, now, worker),) = found[2]
        files = (now - before) / (1 << 20)
        assert files == pytest.approx(4 if own_process else 2, rel=0.01)
        assert worker == MAIN

    in_new_thread(measure)


def test_the_work_of_other_threads_is_counted() -> None:
    clock = telemetry.HelperThreads()
    clock.advance()
    assert clock.advance() == (0, 0), "no other thread has computed since"

    def compute() -> int:
        begun_ns = thread_time_ns()
        while thread_time_ns() - begun_ns < 30_000_000:
            sum(range(1000))
        return thread_time_ns() - begun_ns

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: compute(), range(2)))
        assert telemetry.HelperThreads().advance() == (0, 0), "what was before the first call does not count"
        clock.advance()
        spent_ns = sum(future.result() for future in [pool.submit(compute) for _ in range(2)])
        helped_ns, delayed_ns = clock.advance()
    assert helped_ns >= 0.9 * spent_ns
    assert delayed_ns >= 0


def test_a_kernel_without_run_delays_and_bytes_gives_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "run_delay_ns", lambda: -1)
    monkeypatch.setattr(telemetry, "_files_nbytes", lambda **_: -1)

    def measure() -> None:
        spans: list[telemetry.SpanTuple] = []
        for tick in range(3):
            telemetry.add_run_delay(spans, (tick + 1) * telemetry.RUN_DELAY_EVERY_NS)
        assert spans == []

    in_new_thread(measure)
