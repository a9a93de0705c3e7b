"""Zygotes that die: one death counts once, and the workers requested meanwhile are requested again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_cases import (
    BATCH_SIZE,
    GONE_WITHIN_S,
    Call,
    Once,
    kill_self,
    numbers,
    pools,
    request,
    squares,
    squares_of,
)

from feedline.errors import WorkerDiedError
from feedline.workers.base import Recovery
from feedline.workers.process import fork_server
from feedline.workers.process.pool import ProcessPool

OpenPool = Callable[..., ProcessPool]


@pytest.fixture
def open_pool(no_debris: Any) -> Iterator[OpenPool]:
    fork_server.start()
    yield from pools()


def forkers_of(pool: ProcessPool) -> tuple[psutil.Process, psutil.Process]:
    """The zygote of a pool, and the process that has forked it."""
    zygote = psutil.Process(pool.processes[0].pid).parent()
    branch = zygote and zygote.parent()
    assert zygote is not None
    assert branch is not None
    return zygote, branch


def test_a_request_to_a_process_that_is_ending_is_the_same_death(open_pool: OpenPool, caplog: Any) -> None:
    """A stopped process takes requests as one that is being killed: it never reads them."""
    pool = open_pool(squares(), 2, kind="zygote", recovery=Recovery(deaths_per_epoch=1))
    assert numbers(pool, 4) == list(range(4))
    workers = [psutil.Process(process.pid) for process in pool.processes]
    zygote, branch = forkers_of(pool)
    branch.suspend()
    zygote.kill()
    psutil.wait_procs(workers, GONE_WITHIN_S)
    future = pool.submit(request(4))
    while pool.statistics().restarts == 0:
        assert not future.done()
    branch.kill()
    assert squares_of(future.result().batch)[0] == 4 * BATCH_SIZE
    assert pool.statistics().restarts == 2
    assert sum("exited unexpectedly" in record.message for record in caplog.records) == 2
    # What is counted once is not free: another death exceeds the limit.
    workers = [psutil.Process(process.pid) for process in pool.processes]
    forkers_of(pool)[0].kill()
    psutil.wait_procs(workers, GONE_WITHIN_S)
    with pytest.raises(WorkerDiedError, match="the process that had forked it was killed"):
        numbers(pool, 1)


def test_a_zygote_that_cannot_run_exhausts_the_budget(open_pool: OpenPool, monkeypatch: Any) -> None:
    fork_server.stop()
    monkeypatch.setattr("feedline.workers.process.fork_server._BOOT", "import os; os.kill(os.getpid(), 9)")
    pool = open_pool(squares(), 2, kind="zygote", recovery=Recovery(deaths_per_epoch=1))
    with pytest.raises(WorkerDiedError, match="the process that had forked it was killed"):
        numbers(pool, 1)
    monkeypatch.undo()
    fork_server.stop()


def test_a_dead_zygote_is_asked_for_nothing(open_pool: OpenPool, tmp_path: Path) -> None:
    """Also while a process that an earlier worker left behind keeps its socket open."""
    pid_file = tmp_path / "pid"
    builder = squares({0: Once(tmp_path, Call(_fork_a_child, str(pid_file)))})
    first = open_pool(builder, 1, kind="zygote")
    assert numbers(first, 1) == [0]
    with ProcessPool(first._launcher, 1, recovery=Recovery(deaths_per_epoch=1), timeout_s=GONE_WITHIN_S) as pool:
        assert numbers(pool, 4) == list(range(4))
        forkers_of(pool)[0].kill()
        while pool.statistics().restarts == 0:
            numbers(pool, 1)
        assert numbers(pool, 4) == list(range(4))
    os.kill(int(pid_file.read_text()), signal.SIGKILL)


def _fork_a_child(pid_file: str) -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    Path(pid_file).write_text(str(pid))


def test_a_worker_requested_after_the_death_of_its_zygote(open_pool: OpenPool) -> None:
    """The statistics, which any thread may ask for, have noticed the death before the pool."""
    pool = open_pool(squares(), 2, kind="zygote", recovery=Recovery(deaths_per_epoch=1))
    assert numbers(pool, 4) == list(range(4))
    workers = [psutil.Process(process.pid) for process in pool.processes]
    forkers_of(pool)[0].kill()
    psutil.wait_procs(workers, GONE_WITHIN_S)
    pool.statistics()
    pool.resize(3)
    assert numbers(pool, 4) == list(range(4))
    assert pool.statistics().restarts == 3


def test_the_death_of_the_zygote_is_not_held_against_a_suspect(open_pool: OpenPool, tmp_path: Path) -> None:
    acts = [Once(tmp_path, act, f"{n}") for n, act in enumerate((kill_self, kill_self, _kill_parent))]
    pool = open_pool(squares({1: Call(_call_all, acts)}), 2, kind="zygote")
    assert numbers(pool, 4) == list(range(4))


def _call_all(acts: list[Callable[[], object]]) -> None:
    for act in acts:
        act()


def _kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
