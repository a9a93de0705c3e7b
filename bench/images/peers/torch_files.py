"""torch's DataLoader with worker processes over JPEG files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from steps import prepare
from task import Task


class Files(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, task: Task, decoder: str) -> None:
        self.paths, self.labels = task.files()
        self.prepare = prepare(task, decoder)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.prepare(Path(self.paths[index]).read_bytes()), self.labels[index]


def open_epochs(task: Task, decoder: str) -> Callable[[], Iterable[Any]]:
    dataset = Files(task, decoder)
    loader = DataLoader(
        dataset,
        task.batch,
        sampler=RandomSampler(dataset, num_samples=task.images),
        num_workers=task.workers,
        persistent_workers=True,
    )
    return lambda: loader
