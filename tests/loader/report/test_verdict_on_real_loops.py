"""Verdicts on real loops that sleep. Other programs on the CPUs are among their limits, and are named."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from diagonals import at_night
from torch.utils.data import Dataset, Sampler
from undisturbed import ATTEMPTS, Measurement, measured, was_slowed

import feedline as fl
from feedline.core.dataset import Traits
from feedline.loader.monitoring.resources import usable_cpus
from feedline.loader.report import Verdict

pytestmark = pytest.mark.alone


class Waits(Dataset[torch.Tensor]):
    traits = Traits(thread_safe=True, is_random=False, reads_batches=False)

    def __init__(self, seconds: float, length: int = 100) -> None:
        self.seconds, self.length = seconds, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(2)


class SlowOrder(Sampler[int]):
    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[int]:
        for index in range(100):
            time.sleep(0.005)
            yield index


def slow_collate(samples: list[Any]) -> Any:
    time.sleep(0.02)
    return torch.stack(samples)


def verdict_of(dataset: Any, step_s: float, batch_s: float, **arguments: Any) -> Measurement[Verdict]:
    """The verdict on a loop whose batches come every `batch_s` where nothing else runs."""
    with fl.DataLoader(dataset, batch_size=4, **arguments) as loader:
        began, count = time.perf_counter(), 0
        for _ in loader:
            count += 1
            time.sleep(step_s)
        elapsed_s = time.perf_counter() - began
        verdict = loader.report()
    return Measurement(verdict, verdict, was_slowed(elapsed_s, count * batch_s))


THREADS = {"num_workers": 2, "worker_method": "thread"}


@pytest.mark.parametrize(
    ("stage", "dataset", "step_s", "batch_s", "arguments"),
    [
        ("fetch", Waits(0.005), 0.001, 0.021, {}),
        ("fetch", Waits(0.01), 0.001, 0.02, THREADS),
        ("fetch", Waits(0.01), 0.001, 0.04, {"num_workers": 1, "worker_method": "process"}),
        ("collate", Waits(0.0), 0.001, 0.01, {**THREADS, "collate_fn": slow_collate}),
        ("sample", Waits(0.0), 0.001, 0.02, {**THREADS, "sampler": SlowOrder()}),
        ("step", Waits(0.0), 0.05, 0.05, THREADS),
    ],
    ids=["inline", "threads", "process", "collate", "sampler", "step"],
)
def test_the_limit_is_named_and_the_waiting_explained(
    stage: str, dataset: Any, step_s: float, batch_s: float, arguments: dict[str, Any]
) -> None:
    def is_right(verdict: Verdict) -> bool:
        is_named = verdict.limiting_stage == stage and (verdict.explained_share >= 0.9 or stage == "step")
        return is_named and (stage != "fetch" or advises_workers(verdict))

    measured(lambda: verdict_of(dataset, step_s, batch_s, **arguments), is_right)


def advises_workers(verdict: Verdict) -> bool:
    first = verdict.advice[0]
    return first.arguments.get("num_workers", 0) > 2 and first.gain > 1.5


class Reads(Waits):
    """Samples that are a small part of a file."""

    def __init__(self, path: Path, length: int) -> None:
        super().__init__(0.001, length)
        self.path = path

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + len(self.path.read_bytes())


@pytest.mark.parametrize(
    "arguments",
    [{}, THREADS, {**THREADS, "worker_method": "process"}],
    ids=["inline", "threads", "processes"],
)
def test_all_bytes_that_samples_read_from_files_are_counted(arguments: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    with fl.DataLoader(Reads(path, 240), batch_size=4, **arguments) as loader:
        for _ in loader:
            time.sleep(0.004)
        model = loader.report().replayed
    assert model is not None
    assert model.measured.files_nbytes == pytest.approx(16 << 20, rel=0.05)


class OneAtATime(Waits):
    """Samples that one thread at a time may read."""

    lock: Any = threading.Lock()

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return super().__getitem__(index)


class OneBatchAtATime(Waits):
    """Batches that one process at a time may read: as one arrives, the next has just been begun."""

    lock: Any = multiprocessing.Lock()

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        with self.lock:
            return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (OneAtATime(0.004, 400), {"num_workers": 4, "worker_method": "thread"}),
        (OneBatchAtATime(0.004, 400), {"num_workers": 3, "worker_method": "process"}),
    ],
    ids=["threads", "processes"],
)
def test_workers_that_wait_for_each_other_are_not_advised_to_be_more(dataset: Any, arguments: dict[str, Any]) -> None:
    workers = arguments["num_workers"]

    def is_right(verdict: Verdict) -> bool:
        assert verdict.replayed is not None
        contended = verdict.replayed.measured.contended_share
        more = [advice for advice in verdict.advice if advice.arguments.get("num_workers", 0) > workers]
        is_seen = 0.6 < contended / (1 - 1 / workers) < 1.3  # all but one of them wait
        return verdict.limiting_stage == "fetch" and is_seen and not more and "lock" in verdict.explanation

    measured(lambda: verdict_of(dataset, 0.001, 0.0165, **arguments), is_right)


class LocksForAPart(Waits):
    """Samples that hold a lock for a part of their time, which differs from sample to sample."""

    def __init__(self, seconds: float, length: int, held: float, lock: Any) -> None:
        super().__init__(seconds, length)
        self.held, self.lock = held, lock

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(random.expovariate(1 / (self.seconds * (1 - self.held))))
        with self.lock:
            time.sleep(random.expovariate(1 / (self.seconds * self.held)))
        return torch.zeros(2)


@pytest.mark.parametrize(
    ("held", "lock", "gain", "arguments"),
    [
        (0.5, multiprocessing.Lock(), 1.25, {"num_workers": 2, "worker_method": "process"}),
        (0.1, threading.Lock(), 1.04, {"num_workers": 4, "worker_method": "thread"}),
    ],
    ids=["half, processes", "a tenth, threads"],
)
def test_a_lock_is_named_with_its_cost_unless_it_costs_little(
    held: float, lock: Any, gain: float, arguments: dict[str, Any]
) -> None:
    dataset, workers = LocksForAPart(0.004, 1200, held, lock), arguments["num_workers"]

    def is_right(verdict: Verdict) -> bool:
        bounds = [advice.gain for advice in verdict.advice if "hold the lock" in advice.text]
        assert bool(bounds) == ("holds a lock" in verdict.explanation)
        return abs(bounds[0] / gain - 1) < 0.15 if gain >= 1.2 else not bounds

    measured(lambda: verdict_of(dataset, 0.001, gain * 4.2 * 0.004 / workers, **arguments), is_right)


class ComputesInThreads(Dataset[torch.Tensor]):
    """Samples for which each worker computes in several threads, outside of Python's lock."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        self.pool = self.pool or ThreadPoolExecutor(self.threads)  # not before the fork
        list(self.pool.map(compute, range(self.threads)))
        return torch.zeros(2)


def compute(number: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", b"password", bytes([number]), 5000)


@pytest.mark.parametrize("has_several", [True, False])
def test_threads_of_workers_that_outnumber_the_cpus_are_named(has_several: bool) -> None:
    cpus = usable_cpus()
    dataset = ComputesInThreads(2 * cpus if has_several else 1)

    def is_right(verdict: Verdict) -> bool:
        advises = [place for place, advice in enumerate(verdict.advice) if "one thread in each worker" in advice.text]
        names = "the threads that fetch (ComputesInThreads.__getitem__) starts outnumber" in verdict.explanation
        # Each worker only waits for its threads: one thread would compute as long as all of them together.
        return names == has_several and not advises

    # Not `measured`: the threads take CPUs from each other, as other programs would.
    verdicts = (verdict_of(dataset, 0.0, 0.0, num_workers=2).verdict for _ in range(ATTEMPTS))
    assert any(map(is_right, verdicts))


class ComputesInOperators(Waits):
    """Samples of torch operators, for which the threads of each worker share the work."""

    def __getitem__(self, index: int) -> torch.Tensor:
        rows = weights = torch.ones(256, 256) / 256
        for _ in range(8):
            rows = torch.mm(rows, weights)
        return rows[0]


def take_several_threads(_: int) -> None:
    torch.set_num_threads(2 * usable_cpus())


def test_threads_that_share_the_work_of_a_worker_may_compute_in_vain() -> None:
    def is_right(verdict: Verdict) -> bool:
        advises = any("one thread in each worker" in advice.text for advice in verdict.advice)
        blames_samples = any("do less in ComputesInOperators" in advice.text for advice in verdict.advice)
        return advises and not blames_samples

    arguments = {"num_workers": 2, "worker_init_fn": take_several_threads}
    verdicts = (verdict_of(ComputesInOperators(0.0, 400), 0.0, 0.0, **arguments).verdict for _ in range(ATTEMPTS))
    assert any(map(is_right, verdicts))


CROWDED = """
import json, sys, time
import torch
import feedline as fl

threads, workers = map(int, sys.argv[1:])
torch.set_num_threads(threads)
weights = torch.randn(256, 256)


class Computes(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        end_s = time.thread_time() + 0.005
        while time.thread_time() < end_s:
            pass
        return torch.zeros(2)


with fl.DataLoader(Computes(), batch_size=4, num_workers=workers) as loader:
    for _ in loader:
        for _ in range(8):
            torch.mm(weights, weights)
    advice = loader.report().advice
print(json.dumps([[*each.arguments] for each in advice if "torch.set_num_threads(1) in the training" in each.text]))
"""


@pytest.mark.parametrize(
    ("threads", "workers"),
    [(1, usable_cpus()), (max(usable_cpus(), 2), usable_cpus()), *at_night((max(usable_cpus(), 2), 0))],
)
def test_threads_of_steps_that_wait_for_cpus_of_workers_are_named(threads: int, workers: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CROWDED)
    # The tests let threads sleep while they wait; users' threads compute in vain.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}

    def is_right() -> bool:
        command = [sys.executable, "-W", "ignore", script, str(threads), str(workers)]
        named = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
        # Without workers, the advice of workers names the threads in addition.
        return bool(named) == (threads > 1) and all(("num_workers" in each) != bool(workers) for each in named)

    # Not `measured`: the threads take CPUs from each other, as other programs would.
    assert any(is_right() for _ in range(ATTEMPTS))
