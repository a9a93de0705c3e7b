"""Workers that do not answer: the reports, and their times."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process_cases import Call, Gate, launcher_of, request, squares, squares_of, stop_self

from feedline.core.batch import BatchResult
from feedline.errors import ArgumentError, WorkerStalledError
from feedline.workers.base import Recovery
from feedline.workers.process import fork_server
from feedline.workers.process.futures import ProcessFuture
from feedline.workers.process.pool import ProcessPool
from feedline.workers.process.watchdog import StallTimer

OpenPool = Callable[..., ProcessPool]

TIMEOUT_S = 0.1
"""Short, for short tests. On a busy machine it may also expire for healthy workers: the tests then wait again."""

AT_LAST_S = 60.0
"""Seconds after which only a test that fails still waits."""


@pytest.fixture
def open_pool(no_debris: Any) -> Iterator[OpenPool]:
    fork_server.start()
    opened: list[Any] = []

    def open_one(builder: Any, workers: int, *, kind: str = "snapshot", init_fn: Any = None, **more: Any) -> Any:
        opened.append(launcher_of(kind, builder, init_fn))
        opened.append(ProcessPool(opened[-1], workers, **more))
        return opened[-1]

    yield open_one
    while opened:
        opened.pop().close()


def settled(future: ProcessFuture) -> BatchResult:
    """The result of a future, however often the timeout passes before."""
    deadline = monotonic() + AT_LAST_S
    while monotonic() < deadline:
        with suppress(WorkerStalledError):
            return future.result()
    return future.result()


def stall_of(future: ProcessFuture, *patterns: str) -> WorkerStalledError:
    """The first error of a wait for this future with all these patterns."""
    deadline = monotonic() + AT_LAST_S
    while True:
        with pytest.raises(WorkerStalledError) as caught:
            future.result()
        missing = [pattern for pattern in patterns if not re.search(pattern, str(caught.value))]
        if not missing:
            return caught.value
        assert monotonic() < deadline, f"{caught.value}\nhas no {missing}"


@pytest.mark.parametrize("kind", ["snapshot", "zygote"])
def test_a_timeout_shows_what_every_worker_does(open_pool: OpenPool, tmp_path: Path, kind: str) -> None:
    gate = Gate(tmp_path)
    pool = open_pool(squares({6: gate}), 2, kind=kind, timeout_s=TIMEOUT_S)
    first, second = pool.submit(request(0)), pool.submit(request(1))
    settled(first)
    gate.wait_for()
    error = stall_of(
        second,
        r"^DataLoader timed out after 0\.1 seconds",
        r"worker \d \(pid \d+\) has been busy for \d+\.\d s while it worked on batch 1 .*, at sample 6 \(",
        r"in read_text\n(.*\n)*?.*in __call__\n",
        r"worker \d \(pid \d+\) is idle",
    )
    assert isinstance(error, RuntimeError)
    assert isinstance(error, TimeoutError)
    assert "fork server" not in str(error)
    gate.open()
    assert squares_of(settled(second).batch)[0] == 4


def test_a_stopped_worker(open_pool: OpenPool, monkeypatch: Any) -> None:
    monkeypatch.setattr("feedline.workers.process.watchdog._FIRST_REPLY_S", 0.1)
    pool = open_pool(squares({0: stop_self}), 1, timeout_s=TIMEOUT_S)
    future = pool.submit(request(0))
    stall_of(future, r"It does not answer \(T \(stopped\)\)")
    pid = pool.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    assert squares_of(settled(future).batch)[0] == 0


def test_a_worker_that_holds_the_interpreter(open_pool: OpenPool, tmp_path: Path, monkeypatch: Any) -> None:
    """Its stack is reported nevertheless: the signal is answered without the interpreter."""
    monkeypatch.setattr("feedline.workers.process.pool.GRACE_S", 0.1)
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: Call(_hold, gate)}), 1, timeout_s=TIMEOUT_S)
    future = pool.submit(request(0))
    gate.wait_for()
    stall_of(future, "at sample 0 ", "in _hold")
    pool.close()


def _hold(gate: Gate) -> None:
    gate.reached.write_text(f"{os.getpid()}\n")
    re.match(r"(a|aa)+$", "a" * 60 + "b")  # never ends, in one call of native code


def test_a_worker_that_has_not_started(open_pool: OpenPool, tmp_path: Path, monkeypatch: Any) -> None:
    gate = Gate(tmp_path)
    pool = open_pool(squares(), 1, kind="zygote", timeout_s=TIMEOUT_S, init_fn=lambda _: gate())
    future = pool.submit(request(0))
    gate.wait_for()
    stall_of(future, r"worker 0 \(pid \d+\) is idle\n.*\n(.*\n)*?.*in __call__")
    pool._dispatch.worker_set.status.clear(0)
    monkeypatch.setattr("feedline.workers.process.pool.STARTING_S", 0)
    stall_of(future, "worker 0 has not started yet")
    gate.open()
    assert squares_of(settled(future).batch)[0] == 0


def test_a_long_wait_is_logged_once(open_pool: OpenPool, tmp_path: Path, caplog: Any) -> None:
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: gate}), 2, recovery=Recovery(stall_s=0.05))
    first, second = pool.submit(request(0)), pool.submit(request(1))
    gate.wait_for()
    with caplog.at_level(logging.WARNING, "feedline"), _opening_once_logged(gate, caplog):
        assert squares_of(first.result().batch)[0] == 0
        (record,) = caplog.records  # the wait for the other may be long, too
    assert squares_of(second.result().batch)[0] == 4
    assert re.search(r"no batch for 0\.05 s\.\nworker 0.*at sample 0", record.getMessage(), re.DOTALL)


class _opening_once_logged(logging.Handler):
    """Opens the gate when something is logged."""

    def __init__(self, gate: Gate, caplog: Any) -> None:
        super().__init__()
        self.gate = gate

    def emit(self, record: logging.LogRecord) -> None:
        self.gate.open()

    def __enter__(self) -> None:
        logging.getLogger("feedline").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("feedline").removeHandler(self)


def test_batches_that_come_restart_the_timeout(open_pool: OpenPool, tmp_path: Path, monkeypatch: Any) -> None:
    """As in torch, the clock runs from the latest batch, whichever it was."""
    gate = Gate(tmp_path)

    class Opening(StallTimer):
        def reset(self) -> None:
            super().reset()
            if first.settled and not opened:
                opened.append(last.settled)
                gate.wait_for()
                gate.open()

    opened: list[bool] = []
    monkeypatch.setattr("feedline.workers.process.watchdog.StallTimer", Opening)
    pool = open_pool(squares({4: gate}), 1, timeout_s=60)
    first, last = pool.submit(request(0)), pool.submit(request(1))
    last.result()
    assert opened == [False]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_stall_timer_without_a_timeout_only_logs() -> None:
    clock = Clock()
    timer = StallTimer(0, 60, clock)
    assert timer.left_s() == 60
    clock.now += 61
    assert timer.left_s() == 0
    assert timer.is_log_due()
    assert not timer.is_log_due()
    assert timer.left_s() is None
    assert not timer.is_over()


@given(st.lists(st.floats(0.125, 20), min_size=1, max_size=20), st.floats(0.5, 15))
def test_a_stall_timer_ends_a_timeout_after_the_last_answer(pauses: list[float], timeout_s: float) -> None:
    clock = Clock()
    timer = StallTimer(timeout_s, 1e9, clock)
    for pause in itertools.takewhile(lambda pause: pause < timeout_s, pauses):
        clock.now += pause
        assert not timer.is_over()
        timer.reset()
    clock.now += timeout_s
    assert timer.is_over()
    assert timer.left_s() == 0


@pytest.mark.parametrize("wrong", [{"deaths_per_epoch": -1}, {"stall_s": 0}])
def test_a_recovery_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Recovery(**wrong)
