"""Grain: files mapped in its own worker processes."""

from __future__ import annotations

from pathlib import Path

import grain
import numpy as np
import torch

from steps import prepare
from stream import Slices
from task import Task


class Files:
    """A random access data source of Grain."""

    def __init__(self, task: Task) -> None:
        self.paths, self.labels = task.files()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return Path(self.paths[index]).read_bytes(), self.labels[index]


class DecodeImage(grain.transforms.Map):
    def __init__(self, task: Task, decoder: str) -> None:
        self.prepare = prepare(task, decoder)

    def map(self, sample: tuple[bytes, int]) -> tuple[np.ndarray, int]:
        torch.set_num_threads(1)
        return self.prepare(sample[0]).numpy(), sample[1]


def open_epochs(task: Task, decoder: str) -> Slices:
    """One endless stream, because another iterator would start new worker processes."""
    batches = (
        grain.MapDataset.source(Files(task))
        .shuffle(seed=0)
        .repeat()
        .map(DecodeImage(task, decoder))
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16))
        .batch(task.batch)
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=task.workers, per_worker_buffer_size=1))
    )
    return Slices(iter(batches), task.images // task.batch, ahead=4 * task.workers)
