"""Workers of a large training process: first batch, and 64 batches with the end, with torch's loader and feedline's.

    bench/large_parent.py            # 14 GB of small pages, 4 workers
    bench/large_parent.py 4          # 4 GB

A fork copies the page tables of the whole process: 28 MB for 14 GB of small pages. torch's loader forks once per
worker; feedline forks a snapshot of the process, too, and that snapshot forks all workers but the first.
"""

from __future__ import annotations

import logging
import mmap
import sys
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

import feedline as fl
from harness import Contest
from loaders import first_batch

WORKERS, USUAL = 4, 14
GIB = 2**30


class Rows:
    """Rows of the large memory: a worker that had a copy of it would not fit."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.rows = torch.frombuffer(memory, dtype=torch.uint8).view(-1, 2**20)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index, :64].clone()


def filled(size: int) -> mmap.mmap:
    """Private memory of small pages, all of them written.

    No process of this size has more page-table entries.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(0, size, mmap.PAGESIZE):
        memory[page] = 1
    return memory


def epoch(make: Callable[[], Any]) -> float:
    """Seconds of the first 64 batches and the end of the workers."""
    start = perf_counter()
    iterator = iter(make())
    for _ in range(64):
        next(iterator)
    del iterator
    return perf_counter() - start


def main(gigabytes: int) -> None:
    free = psutil.virtual_memory().available
    if gigabytes * GIB > 0.9 * free:
        raise SystemExit(f"{gigabytes} GB do not fit: {free / GIB:.1f} GB of memory are free; name a smaller size")
    logging.getLogger("feedline").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs, on purpose
    dataset = Rows(filled(gigabytes * GIB))
    makers: dict[str, Callable[[], Any]] = {
        "torch": lambda: DataLoader(dataset, 8, num_workers=WORKERS, shuffle=True),
        "feedline": lambda: fl.DataLoader(dataset, 8, num_workers=WORKERS, shuffle=True, worker_method="process"),
    }
    size = "" if gigabytes == USUAL else f" ({gigabytes} GB)"
    for name, measure in (("large process, first batch", first_batch), ("large process, 64 batches", epoch)):
        contest = Contest(name + size, unit="s", baseline="torch")
        for loader, make in makers.items():
            contest.measure(loader, lambda make=make, measure=measure: measure(make))  # type: ignore[misc]
        contest.run(rounds=5).publish()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else USUAL)
