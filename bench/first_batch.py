"""Time to the first batch from worker processes: of a process, of a later loader, of the second epoch, of a new worker.

torch and feedline start their workers by the same method in each contest. Then the CPU time of `import feedline` in a
process that has imported torch.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

from torch.utils.data import DataLoader

import feedline as fl
from feedline.core.schedule import BatchRequest
from feedline.loader.building.builder import BatchBuilder
from feedline.workers.process.pool import ProcessPool
from feedline.workers.process.snapshot import SnapshotLauncher
from harness import Contest
from loaders import first_batch

WORKERS = 2


class Numbers:
    """Samples that cost nothing, except sample 0, which can take a second."""

    def __init__(self, slow: bool = False) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if self.slow and index == 0:
            sleep(1)
        return index


Make = Callable[[], Any]
LOADERS: dict[str, Make] = {
    "torch": lambda: DataLoader(Numbers(), 8, num_workers=WORKERS),
    "feedline": lambda: fl.DataLoader(Numbers(), 8, num_workers=WORKERS, worker_method="process"),
}


def in_a_new_process(name: str, method: str) -> Callable[[], float]:
    """The same in a new process, where no loader existed before, with a default start method of multiprocessing."""

    def measure() -> float:
        done = subprocess.run([sys.executable, __file__, name, method], capture_output=True, text=True, check=True)
        return float(done.stdout)

    return measure


def second_epoch(make: Make) -> Callable[[], float]:
    def measure() -> float:
        loader = make()
        for _ in loader:
            pass
        start = perf_counter()
        iterator = iter(loader)
        next(iterator)
        seconds = perf_counter() - start
        del iterator
        return seconds

    return measure


def request(number: int) -> BatchRequest:
    return BatchRequest(0, number, number, number + 1, [number], range(number, number + 1), None)


def replaced() -> float:
    """Seconds from `kill -9` of the only worker to a batch from its replacement."""
    launcher = SnapshotLauncher(BatchBuilder(Numbers()))
    with ProcessPool(launcher, 1) as pool:
        pool.submit(request(1)).result()
        start = perf_counter()
        pool.processes[0].kill()
        pool.processes[0].join()
        pool.submit(request(2)).result()
        seconds = perf_counter() - start
    launcher.close()
    return seconds


def added() -> float:
    """Seconds from `resize` to a batch from the added worker, while the other one is busy."""
    launcher = SnapshotLauncher(BatchBuilder(Numbers(slow=True)))
    with ProcessPool(launcher, 1) as pool:
        pool.submit(request(1)).result()
        busy = pool.submit(request(0))
        start = perf_counter()
        pool.resize(2)
        pool.submit(request(2)).result()
        seconds = perf_counter() - start
        assert not busy.done()
    launcher.close()
    return seconds


def imported() -> float:
    """CPU seconds of `import feedline` in a new process, after `import torch`."""
    script = "import time, torch; start = time.process_time(); import feedline; print(time.process_time() - start)"
    return float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    first = Contest("first batch of a process", unit="s", baseline="torch")
    fresh = Contest("first batch of a process, forkserver", unit="s", baseline="torch")
    later = Contest("first batch of a later loader", unit="s", baseline="torch")
    epoch = Contest("first batch of the second epoch", unit="s", baseline="torch")
    for name, make in LOADERS.items():
        first.measure(name, in_a_new_process(name, "fork"))
        fresh.measure(name, in_a_new_process(name, "forkserver"))
        later.measure(name, lambda make=make: first_batch(make))  # type: ignore[misc]
        epoch.measure(name, second_epoch(make))
    first.run(rounds=5, warm_up=1).publish()
    fresh.run(rounds=3, warm_up=0).publish()
    later.run(rounds=7).publish()
    epoch.run(rounds=7).publish()
    logging.getLogger("feedline").setLevel(logging.ERROR)  # these deaths are intended
    worker = Contest("another worker process", unit="s", baseline="replaced")
    worker.measure("replaced", replaced)
    worker.measure("added", added)
    worker.run(rounds=7).publish()
    start = Contest("import after torch", unit="s", baseline="the limit")
    start.measure("the limit", lambda: 0.15)
    start.measure("feedline", imported)
    start.run(rounds=7, warm_up=1).publish()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        multiprocessing.set_start_method(sys.argv[2])
        print(first_batch(LOADERS[sys.argv[1]]))
        sys.stdout.flush()
        os._exit(0)
    main()
