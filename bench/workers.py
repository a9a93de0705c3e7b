"""Samples that cost Python time, all or a few of them; compared with torch, with the same workers, in order."""

from __future__ import annotations

from time import process_time
from typing import Any

from torch.utils.data import DataLoader, Dataset

import feedline as fl
from harness import Contest
from loaders import rate


def turns_of(busy_s: float) -> int:
    """Turns of the loop in `Busy` that take this much CPU time."""
    turns, start = 1_000_000, process_time()
    compute(turns)
    return round(turns * busy_s / (process_time() - start))


def compute(turns: int) -> None:
    """Pure Python. A loop until a moment on the clock would also count time in which another process had the CPU."""
    for _ in range(turns):
        pass


class Busy(Dataset[int]):
    """Pure Python for `busy_s` of CPU time per sample; every `slow_every`-th sample takes `times` as long."""

    def __init__(self, length: int, busy_s: float, slow_every: int = 0, times: int = 1) -> None:
        self.length, self.turns, self.slow_every, self.times = length, turns_of(busy_s), slow_every, times

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        slow = self.slow_every and index % self.slow_every == 0
        compute(self.turns * (self.times if slow else 1))
        return index


def contest(name: str, dataset: Busy, **arguments: Any) -> None:
    race = Contest(name, unit="samples/s", baseline="torch")
    each = arguments["batch_size"]
    race.measure("torch", rate(lambda: DataLoader(dataset, **arguments), each, most_s=3))
    race.measure("feedline", rate(lambda: fl.DataLoader(dataset, **arguments), each, most_s=3))
    race.run(rounds=5).publish()


if __name__ == "__main__":
    contest("5 ms of Python per sample", Busy(1200, 0.005), batch_size=8, num_workers=2)
    contest("head of line", Busy(6000, 0.0005, slow_every=50, times=20), batch_size=8, num_workers=2)
