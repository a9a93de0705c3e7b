"""Workers that end when all requests are answered, before the pool is closed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from diagonals import diagonal
from process_cases import BATCH_SIZE, Call, Gate, Once, kill_self, pools, request, squares, squares_of

from feedline.workers.process import fork_server
from feedline.workers.process.pool import ProcessPool
from feedline.workers.process.snapshot import SnapshotProcessGroup

OpenPool = Callable[..., ProcessPool]

ENDS_WITHIN_S = 60.0


@pytest.fixture
def open_pool(no_debris: Any) -> Iterator[OpenPool]:
    """Pools that are closed at the end; no test may leave anything, nor log anything."""
    yield from pools()


def nothing() -> None:
    pass


def answered(pool: ProcessPool, requests: int = 4) -> list[int]:
    """First squares of the batches of a pool that has answered all its requests."""
    futures = [pool.submit(request(number)) for number in range(requests)]
    assert all(process.pid for process in pool.processes)  # waits for their start
    return [squares_of(future.result().batch)[0] // BATCH_SIZE for future in futures]


def join(pool: ProcessPool) -> None:
    for process in pool.processes:
        process.join(ENDS_WITHIN_S)
        assert not process.is_alive()


@pytest.mark.parametrize(("kind", "round_robin"), diagonal(["snapshot", "zygote", "fork"], [False, True]))
def test_workers_end_before_the_pool_is_closed(
    open_pool: OpenPool, kind: str, round_robin: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "zygote":
        fork_server.start()
    pool = open_pool(squares(), 2, kind=kind, round_robin=round_robin)
    assert answered(pool) == [0, 1, 2, 3]
    alive: list[bool] = []
    assert pool.end_when_answered(lambda: alive.extend(process.is_alive() for process in pool.processes))
    assert alive == [True, True]
    before = pool.statistics()
    join(pool)
    assert pool.statistics() == before
    assert (before.workers, len(before.pids)) == (2, 2)
    pool.resize(3)
    assert pool.statistics() == before
    assert pool.end_when_answered(nothing)
    pool.close()
    assert [process.exitcode for process in pool.processes] == [0, 0]
    assert pool.statistics().restarts == 0
    assert not caplog.records


def test_a_snapshot_ends_with_its_workers(open_pool: OpenPool) -> None:
    pool = open_pool(squares(), 2)
    answered(pool)
    group: Any = pool._dispatch.worker_set.group
    assert isinstance(group, SnapshotProcessGroup)
    assert pool.end_when_answered(nothing)
    (pidfd,) = group._snapshot.pidfds
    ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    assert (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)


@pytest.mark.parametrize("killed", [False, True])
def test_a_missing_answer_is_never_cut_off(
    open_pool: OpenPool, tmp_path: Path, killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(tmp_path)
    pool = open_pool(
        squares({0: Once(tmp_path, gate, "first"), 1: Once(tmp_path, kill_self if killed else nothing)}), 2
    )
    slow = pool.submit(request(0))
    gate.wait_for()
    fast = [pool.submit(request(number)) for number in range(1, 4)]
    assert [squares_of(future.result().batch)[0] for future in fast] == [4, 8, 12]
    assert not pool.end_when_answered(lambda: pytest.fail("a request is not answered"))
    assert not slow.done()
    gate.open()
    assert squares_of(slow.result().batch) == [0, 1, 2, 3]
    assert pool.end_when_answered(nothing)
    join(pool)
    assert len(caplog.records) == pool.statistics().restarts == killed


@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_killed_after_its_last_answer(
    open_pool: OpenPool, worker: int, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = open_pool(squares(), 2, round_robin=True)
    assert answered(pool) == [0, 1, 2, 3]
    process = pool.processes[worker]

    def kill() -> None:
        process.kill()
        process.join(ENDS_WITHIN_S)

    if moment == "before":
        kill()
    assert pool.end_when_answered(kill if moment == "during" else nothing)
    if moment == "after":
        process.kill()
    join(pool)
    assert len(pool.processes) == 2
    pool.close()
    assert pool.statistics().restarts == 0
    assert not caplog.records


def test_a_snapshot_killed_after_the_last_answer(open_pool: OpenPool, caplog: pytest.LogCaptureFixture) -> None:
    pool = open_pool(squares(), 2)
    answered(pool)
    group: Any = pool._dispatch.worker_set.group
    assert pool.end_when_answered(lambda: os.kill(group._snapshot.pid, signal.SIGKILL))
    join(pool)
    pool.close()
    assert not caplog.records


def test_canceled_requests_are_answered_first(open_pool: OpenPool, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: gate}), 1, reports_generators=True, round_robin=True)
    canceled = pool.submit(request(0))
    gate.wait_for()
    canceled.cancel()
    last = pool.submit(request(1))
    assert not pool.end_when_answered(nothing)
    gate.open()
    assert squares_of(last.result().batch)[0] == BATCH_SIZE
    assert pool.end_when_answered(nothing)
    join(pool)


def test_a_forked_child_of_the_users_lets_no_worker_end(open_pool: OpenPool) -> None:
    pool = open_pool(squares(), 2)
    answered(pool)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if pool.end_when_answered(lambda: os._exit(1)) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert answered(pool) == [0, 1, 2, 3]
    assert all(process.is_alive() for process in pool.processes)


class AtCall:
    """Acts at the entry of the `at`-th function that is called in the rooms of the workers."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self.at, self.act, self.count = at, act, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and "feedline/workers" in frame.f_code.co_filename:
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.act()
        return None


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("act", ["interrupt", "close"])
def test_interrupts_and_closing_at_any_call_leave_nothing(open_pool: OpenPool, act: str) -> None:
    at = 0
    while True:
        at += 1
        pool = open_pool(squares(), 2, round_robin=True)
        answered(pool, 2)
        trace = AtCall(at, interrupt if act == "interrupt" else Call(pool.close))
        former = sys.gettrace()
        sys.settrace(trace)
        try:
            pool.end_when_answered(nothing)
        except KeyboardInterrupt:
            pass
        except OSError:  # the loop, which is closed, ignores it
            assert act == "close"
        finally:
            sys.settrace(former)
        pool.close()
        join(pool)
        if trace.count < at:
            break
    assert at > 8
