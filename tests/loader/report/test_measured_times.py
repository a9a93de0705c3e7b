"""CPU time, waiting and sampler time of real loops: computing is distinguished from waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import feedline as fl
from feedline.workers.process.pool import ProcessPool


class Sleeping(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.zeros(2)


class Computing(Sleeping):
    def __getitem__(self, index: int) -> torch.Tensor:
        deadline = time.thread_time() + 0.01
        while time.thread_time() < deadline:
            sum(range(1000))
        return torch.zeros(2)


class SlowOrder(torch.utils.data.Sampler[int]):
    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        for index in range(32):
            time.sleep(0.005)
            yield index


@pytest.mark.parametrize(("workers", "method"), [(0, "auto"), (2, "process"), (2, "thread")])
@pytest.mark.parametrize(("dataset", "computes"), [(Sleeping(), False), (Computing(), True)])
def test_a_fetch_that_sleeps_is_distinguished_from_one_that_computes(
    workers: int, method: str, dataset: Dataset[Any], computes: bool
) -> None:
    with fl.DataLoader(dataset, batch_size=4, num_workers=workers, worker_method=method) as loader:
        for _ in loader:
            pass
        fetch = loader.stats().stages["fetch"]
    assert fetch.cpu_s is not None
    if computes:
        assert fetch.cpu_s >= 0.3  # 32 samples of 10 ms each
    else:
        assert fetch.cpu_s <= 0.5 * fetch.total_s


def begin_late(worker: int) -> None:
    time.sleep(0.3 * worker)


def test_the_starts_of_all_workers_are_no_waiting_for_batches() -> None:
    """The loop waits for the first batch of each worker."""
    loader = fl.DataLoader(range(24), batch_size=4, num_workers=3, worker_init_fn=begin_late)  # type: ignore[arg-type]
    with loader:
        for _ in range(2):
            assert len(list(loader)) == 6
        verdict = loader.report()
    assert verdict.limiting_stage == "startup"
    assert verdict.replayed is not None
    assert verdict.replayed.startup_s >= 0.55
    assert verdict.replayed.measured.wait_s < 0.1
    assert {"persistent_workers": True} in [advice.arguments for advice in verdict.advice]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_time_of_a_sampler_is_a_stage(workers: int) -> None:
    with fl.DataLoader(Sleeping(), batch_size=4, sampler=SlowOrder(), num_workers=workers) as loader:
        for _ in loader:
            pass
        stages = loader.stats().stages
    assert stages["sample"].total_s >= 32 * 0.005
    assert stages["sample"].workers == (-1,)


class SlowListing(SlowOrder):
    def __iter__(self) -> Iterator[int]:
        time.sleep(0.3)
        yield from range(32)


def test_the_listing_of_an_order_is_no_start_of_workers() -> None:
    with fl.DataLoader(Sleeping(), 4, sampler=SlowListing(), num_workers=2, worker_method="thread") as loader:
        for _ in loader:
            pass
        model = loader.report().replayed
    assert model is not None
    assert model.startup_s - model.measured.closing_s < model.measured.startup_s - 0.29


def test_the_cpu_time_of_a_step_counts_its_computing_only() -> None:
    loader = fl.DataLoader(Computing(), batch_size=4)
    for step, _ in enumerate(loader):
        if step % 2:
            time.sleep(0.02)
        else:
            deadline = time.process_time() + 0.01
            while time.process_time() < deadline:
                sum(range(1000))
    stats = loader.stats()
    assert stats.step_cpu_s is not None
    assert 0.02 <= stats.step_cpu_s < 0.75 * stats.step_s


def attempts() -> Iterator[int]:
    """Numbers of attempts to measure while nothing else runs."""
    yield from range(5)
    raise AssertionError("the measurement was wrong each time")


def slow_life(closing: Path, _: int) -> None:
    """Make a worker process start slowly, and end slowly once the file exists."""
    time.sleep(0.2)
    Finalize(None, end_slowly, (closing,), exitpriority=0)


def end_slowly(closing: Path) -> None:
    while not closing.exists():
        time.sleep(0.005)
    time.sleep(0.1)


def test_the_start_and_the_end_of_workers_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closing, close = tmp_path / "closing", ProcessPool.close
    # A worker begins to end while the loop works on its last batch, for which a busy machine may take long.
    monkeypatch.setattr(ProcessPool, "close", lambda pool: (closing.touch(), close(pool)))
    init_fn = partial(slow_life, closing)
    workers: dict[str, Any] = {"num_workers": 1, "worker_method": "process", "worker_init_fn": init_fn}
    with fl.DataLoader(Sleeping(), batch_size=16, **workers) as loader:
        began = time.perf_counter()
        for _ in loader:
            pass
        elapsed_s = time.perf_counter() - began
        stats = loader.stats()
    assert stats.startup_s >= 0.2
    assert stats.closing_s >= 0.1
    assert stats.wall_s + stats.closing_s <= elapsed_s


def lock_wait_s(dataset: Dataset[Any]) -> float:
    """The wait of threads for the lock of Python."""
    with fl.DataLoader(dataset, batch_size=4, num_workers=2, worker_method="thread") as loader:
        for _ in loader:
            time.sleep(0.001)
        stats = loader.stats()
    assert stats.lock_s is not None
    assert stats.loop_lock_s is not None
    assert not {"lock", "step.switches"} & {*stats.stages, *stats.loop}
    return max(stats.lock_s, stats.loop_lock_s)


def test_a_probe_shows_whether_threads_hold_the_lock_of_python() -> None:
    sleeping, computing = list[float](), list[float]()
    for _ in attempts():
        # Each in a new thread: a thread that has waited long for the lock is not probed again for a while.
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            sleeping.append(one.submit(lock_wait_s, Sleeping()).result())
            computing.append(other.submit(lock_wait_s, Computing()).result())
        if min(sleeping) < max(computing):  # both include a wait for a CPU
            break
    assert fl.DataLoader(Sleeping()).stats().lock_s is None
