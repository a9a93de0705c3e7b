"""Hundreds of workers and pools, ended in every way: descriptors, processes and memory stay where they were."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from diagonals import diagonal
from process_cases import Squares, default_start_method, launcher_of, request
from rounds import rounds

import feedline
from feedline.loader.building.builder import BatchBuilder
from feedline.workers.base import Recovery
from feedline.workers.process import fork_server
from feedline.workers.process.pool import ProcessPool
from feedline.workers.process.zygote import ZygoteLauncher

pytestmark = pytest.mark.stress


class Large(Squares):
    """Samples whose batches travel in slots."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 << 14,), index)


@pytest.fixture(autouse=True)
def clean(no_debris: Any, caplog: Any) -> None:
    fork_server.start()
    caplog.set_level(logging.ERROR, "feedline")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def in_full(loader: Any) -> None:
    assert len(list(loader)) == 25


def broken_off(loader: Any) -> None:
    for _ in loader:
        break


def with_an_error(loader: Any) -> None:
    def loop() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()


def dropped(loader: Any) -> None:
    iterator = iter(loader)
    next(iterator)
    del iterator


def never_used(loader: Any) -> None:
    iter(loader)


def twice_at_once(loader: Any) -> None:
    first = iter(loader)
    next(first)
    second = iter(loader)  # for persistent workers, torch's loaders and ours end the first one here
    next(second)
    next(first, None)
    del first
    next(second)


def after_a_kill(loader: Any) -> None:
    iterator = iter(loader)
    next(iterator)
    iterator._workers[0].kill()
    next(iterator)


WAYS = [in_full, broken_off, with_an_error, dropped, never_used, twice_at_once, after_a_kill]


@pytest.mark.parametrize(("way", "methods"), diagonal(WAYS, [("fork", "forkserver"), ("forkserver", "fork")]))
def test_a_loader_leaves_nothing(way: Callable[[Any], None], methods: tuple[str, str]) -> None:
    """Each way to end, with new workers of the first start method and with persistent ones of the second."""
    for persistent, method in zip((False, True), methods, strict=True):
        loader: Any = feedline.DataLoader(
            Large(100), batch_size=4, num_workers=2, worker_method="process", persistent_workers=persistent
        )
        with default_start_method(method):
            way(loader)
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "feedline-finalizer":  # ends the workers of an iteration in a cycle
                thread.join()
        if not persistent:
            assert "feedline-0" not in [child.name() for child in psutil.Process().children(recursive=True)]
        loader.close()


def test_many_pools_leave_nothing_in_the_fork_server() -> None:
    counts = set()
    for number in range(rounds(4, 12)):
        launcher = ZygoteLauncher(BatchBuilder(Large()))
        with ProcessPool(launcher, 2) as pool:
            pool.submit(request(number)).result()
        launcher.close()
        gc.collect()
        _until_zygotes_ended(fork_server.start().pid)
        counts.add((descriptors(fork_server.start().pid), descriptors(psutil.Process().pid)))
    assert len(counts) == 1


def _until_zygotes_ended(pid: int) -> None:
    """Zygotes end by themselves after their launcher has closed; branches with imported packages stay."""
    below = psutil.Process(pid).children(recursive=True)
    psutil.wait_procs([process for process in below if process.name() == "feedline-zygote"], 60)


@pytest.mark.parametrize("kind", ["snapshot", "zygote"])
def test_many_deaths_leave_nothing_in_their_parent(kind: str) -> None:
    launcher = launcher_of(kind, BatchBuilder(Large()))
    with ProcessPool(launcher, 2, recovery=Recovery(deaths_per_epoch=1000)) as pool:
        zygote = psutil.Process(pool.processes[-1].pid).parent()
        assert zygote is not None
        counts = []
        for number in range(rounds(12, 60)):
            pool.processes[number % 2].kill()
            while pool.statistics().restarts <= number:
                assert int(pool.submit(request(number)).result().batch[0, 0]) == 4 * number
            assert all(process.pid for process in pool.processes)  # all of them have started
            counts.append((descriptors(zygote.pid), zygote.memory_info().rss >> 20))
        assert len({count for count, _ in counts[5:]}) == 1
        assert counts[-1][1] <= counts[5][1] + 2
    launcher.close()
