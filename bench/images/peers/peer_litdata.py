"""LitData over its own chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from litdata import StreamingDataLoader, StreamingDataset

from steps import prepare
from task import Task


class CorpusDataset(StreamingDataset):
    def __init__(self, task: Task, decoder: str) -> None:
        super().__init__(str(task.form("litdata")), shuffle=True, subsample=task.images / task.image_count)
        self.prepare = prepare(task, decoder)

    def __getitem__(self, index: Any) -> tuple[Any, int]:
        sample = super().__getitem__(index)
        return self.prepare(sample["image"]), sample["label"]


def open_epochs(task: Task, decoder: str) -> Callable[[], Iterable[Any]]:
    loader = StreamingDataLoader(
        CorpusDataset(task, decoder), batch_size=task.batch, num_workers=task.workers, persistent_workers=True
    )
    return lambda: loader
