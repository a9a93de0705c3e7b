"""Small samples: windows of a token file and rows of a table, shuffled; compared with torch and a bare take."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import feedline as fl
from harness import Contest
from loaders import rate

SEED = 0


class Rows(Dataset[torch.Tensor]):
    """The usual dataset: one row per call."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.array[index]))


class ManyRows(Rows):
    """The fastest dataset for torch: many rows per call."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(torch.from_numpy(self.array[indices]))


class Take:
    """No loader at all: a permutation, and one vectorized take per batch into new memory."""

    def __init__(self, array: np.ndarray, batch_size: int) -> None:
        self.array, self.batch_size = array, batch_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = np.random.default_rng(SEED).permutation(len(self.array))
        for start in range(0, len(order), self.batch_size):
            yield torch.from_numpy(np.take(self.array, order[start : start + self.batch_size], axis=0))


def contest(name: str, array: np.ndarray, ours: Any, batch_size: int) -> None:
    race = Contest(name, unit="batches/s", baseline="torch, 0 workers")
    for workers in (0, 2, 4):
        arguments = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
        race.measure(f"torch, {workers} workers", rate(lambda a=arguments: DataLoader(Rows(array), **a), most_s=1))
    race.measure(
        "torch, __getitems__, 0 workers",
        rate(lambda: DataLoader(ManyRows(array), batch_size, shuffle=True), most_s=1),
    )
    race.measure("vectorized take, no loader", rate(lambda: Take(array, batch_size), most_s=1))
    for workers in (0, 1, 2):
        arguments = {"batch_size": batch_size, "shuffle": True, "seed": SEED, "num_workers": workers}
        race.measure(f"feedline, {workers} workers", rate(lambda a=arguments: fl.DataLoader(ours, **a), most_s=1))
    race.run(rounds=5).publish()


def main() -> None:
    rng = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as folder:
        tokens, table = Path(folder, "tokens.bin"), Path(folder, "table.npy")
        rng.integers(0, 50_000, 200_000 * 1024, np.uint16).tofile(tokens)
        np.save(table, rng.random((2_000_000, 100), np.float32))
        flat = np.memmap(tokens, np.uint16, "r").reshape(-1, 1024)
        contest("tokens 64 x 1024 x uint16", flat, fl.datasets.TokenFile(tokens, 1024, dtype="uint16"), 64)
        contest("table 1024 x 100 x float32", np.load(table, "r"), fl.datasets.ArrayFile(table), 1024)


if __name__ == "__main__":
    main()
