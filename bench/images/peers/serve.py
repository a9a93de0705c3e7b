"""One contestant: loads a reader of images, then runs an epoch for every line on standard input.

    python serve.py MODULE TASK OPTIONS

Runs in the peer's own environment. Every answer is a line of JSON on standard output: the time of the epoch, and a
tally of its batches, which reveals a contestant that did not do the work.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import numpy as np

from task import MEAN, STD, Task

STEP = 32
"""Step between the rows and columns of an image that are read: enough of them for the mean, too few to take time."""


class Tally:
    """The delivered batches: number of images, their mean, and the number of different batches."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.images = 0
        self.sums: list[np.ndarray] = []
        self.seen: set[bytes] = set()
        self.labels: set[int] = set()

    def add(self, pixels: Any, labels: Any) -> None:
        array = np.asarray(pixels)
        expected = np.dtype(self.task.output)
        if array.shape[1:] != self.task.shape or array.dtype != expected:
            raise ValueError(f"a batch of {array.dtype} {array.shape}; expected {expected} (N, *{self.task.shape})")
        if len(array) != len(labels):
            raise ValueError(f"{len(array)} images and {len(labels)} labels in a batch")
        looked = self._looked_at(array)
        self.images += len(array)
        self.sums.append(looked.mean(axis=(1, 2)).sum(axis=0))
        self.seen.add(hashlib.blake2b(looked[0].tobytes()).digest())
        self.labels.update(np.unique(np.asarray(labels)).tolist())

    def count(self, images: int) -> None:
        """Count the images of a limit, which delivers no batches."""
        self.images += images

    def summary(self) -> dict[str, Any]:
        mean = None if not self.sums else (np.sum(self.sums, axis=0) / self.images).tolist()
        return {
            "images": self.images,
            "mean": mean,
            "batches": len(self.sums),
            "different": len(self.seen),
            "labels": sorted(self.labels),
        }

    def _looked_at(self, array: np.ndarray) -> np.ndarray:
        """Every `STEP`-th pixel as levels from 0 to 255, (N, H, W, 3)."""
        if self.task.output == "uint8":
            return array[:, ::STEP, ::STEP].astype(np.float32)
        part = array[:, :, ::STEP, ::STEP].transpose(0, 2, 3, 1)
        return (part * np.float32(STD) + np.float32(MEAN)) * 255


def run(batches: Iterable[Any], task: Task) -> dict[str, Any]:
    """Read one epoch to its end."""
    tally = Tally(task)
    start = perf_counter()
    for batch in batches:
        if isinstance(batch, int):
            tally.count(batch)
        else:
            tally.add(*batch)
    return {"seconds": perf_counter() - start, **tally.summary()}


def main() -> None:
    module, task_text, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not be taken for an answer
    task = Task.loads(task_text)
    epoch = importlib.import_module(module).open_epochs(task, **json.loads(options))
    thrown_away = getattr(epoch, "ahead", 0) * task.batch
    answers.write('{"ready": true}\n')
    for _ in sys.stdin:
        answers.write(json.dumps({**run(epoch(), task), "thrown_away": thrown_away}) + "\n")
    os._exit(0)  # the shutdown of a contestant is not measured


if __name__ == "__main__":
    main()
