"""WebDataset over tar shards, in torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import webdataset as wds
from torch.utils.data import DataLoader

from steps import prepare
from task import Task


def open_epochs(task: Task, decoder: str) -> Callable[[], Iterable[Any]]:
    shards = sorted(str(path) for path in task.form("tar").glob("*.tar"))
    dataset = (
        wds.WebDataset(shards, resampled=True, shardshuffle=False)
        .shuffle(100)
        .to_tuple("jpg", "cls")
        .map_tuple(prepare(task, decoder), int)
        .with_epoch(task.images // task.workers)
    )
    loader = DataLoader(dataset, task.batch, num_workers=task.workers, persistent_workers=True)
    return lambda: loader
