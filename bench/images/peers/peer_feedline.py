"""feedline over files, over WebDataset tars, and over tars of `feedline pack`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import RandomSampler

import feedline as fl
from feedline import transforms
from task import MEAN, SHORTER, STD, Task


def open_epochs(task: Task, form: str, workers: str = "thread", scaled: bool = False) -> Callable[[], Iterable[Any]]:
    """`workers` is a worker method; with "auto" feedline chooses it and the number of workers."""
    dataset = _dataset(task, form, scaled)
    number: Any = "auto" if workers == "auto" else task.workers
    loader = fl.DataLoader(
        dataset,
        task.batch,
        sampler=RandomSampler(dataset, num_samples=task.images),
        num_workers=number,
        worker_method=workers,
        persistent_workers=True,
        seed=0,
    )
    return lambda: loader


def _dataset(task: Task, form: str, scaled: bool) -> Any:
    transform = transforms.Compose(_steps(task, scaled))
    if form == "files":
        return fl.datasets.ImageFolder(task.form(form), transform=transform)
    return fl.datasets.TarShards(task.form(form), ("jpg;npy", "cls"), transform=transform)


def _steps(task: Task, scaled: bool) -> list[Any]:
    if task.recipe == "random":
        crop = transforms.RandomResizedCrop(task.size, task.scale, scaled_decode=scaled)
        steps: list[Any] = [crop, transforms.RandomHorizontalFlip()]
    else:
        steps = [transforms.Resize(SHORTER, scaled_decode=scaled), transforms.CenterCrop(task.size)]
    return [*steps, transforms.Normalize(MEAN, STD)] if task.output == "float32" else steps
