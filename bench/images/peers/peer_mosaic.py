"""Mosaic Streaming over its own shards (MDS), in torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

from steps import prepare
from task import Task


class CorpusDataset(StreamingDataset):
    def __init__(self, task: Task, decoder: str) -> None:
        super().__init__(
            local=str(task.form("mds")), shuffle=True, batch_size=task.batch, epoch_size=task.images,
            num_canonical_nodes=1,
        )  # fmt: skip
        self.prepare = prepare(task, decoder)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        sample = super().__getitem__(index)
        return self.prepare(sample["image"]), sample["label"]


def open_epochs(task: Task, decoder: str) -> Callable[[], Iterable[Any]]:
    clean_stale_shared_memory()
    dataset = CorpusDataset(task, decoder)
    loader = DataLoader(dataset, task.batch, num_workers=task.workers, persistent_workers=True)
    return lambda: loader
