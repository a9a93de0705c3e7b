"""Growth of the workers' memory, and the memory that is left."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import NamedTuple

from feedline.core.cgroups import Cgroup
from feedline.core.proc import meminfo, tree_nbytes

MOST_POINTS = 128
"""Readings that are kept; of more, every second one is dropped."""


WARM_UP = 0.5
"""Part of the first epoch in which workers load libraries and touch their data for the first time."""


class _MemoryReading(NamedTuple):
    epochs: float
    nbytes: int
    ends: bool
    workers: int


@dataclass(slots=True)
class MemoryTrend:
    """Readings of the resident memory of all workers of a loader."""

    persistent: bool = False
    """True if the workers stay from epoch to epoch."""
    _readings: list[_MemoryReading] = field(default_factory=list)

    def add(self, epochs: float, nbytes: int, *, ends: bool = False, workers: int = 0) -> None:
        """Add a reading of `workers` after a number of `epochs`.

        `ends` is True at the end of an epoch. A reading of 0 bytes is ignored.
        """
        if not nbytes:
            return
        before = next((each for each in reversed(self._readings) if each.ends), None)
        if ends and before is not None and before.workers != workers:  # more workers do not mean that they grow
            self._readings.clear()
        self._readings.append(_MemoryReading(epochs, nbytes, ends, workers))
        if len(self._readings) > MOST_POINTS:
            self._readings = [each for place, each in enumerate(self._readings) if each.ends or place % 2]
            self._readings = self._readings[-MOST_POINTS:]

    def growth(self) -> float | None:
        """Bytes per epoch; None before the end of the second epoch.

        Fresh workers are compared at the ends of their epochs, when they are equally warm. Persistent ones warm up
        once, so the first epoch is left out, or its first half if there are only two.
        """
        ends = [each for each in self._readings if each.ends]
        if len(ends) < 2:
            return None
        if not self.persistent:
            first, last = ends[0], ends[-1]
            return (last.nbytes - first.nbytes) / max(last.epochs - first.epochs, 1.0)
        since = ends[0].epochs if len(ends) > 2 else ends[0].epochs - 1 + WARM_UP
        later = [each for each in self._readings if each.epochs >= since]
        if len({each.epochs for each in later}) < 2:  # epochs that were resumed near their end
            return None
        return linear_regression([each.epochs for each in later], [each.nbytes for each in later]).slope


def memory_left(group: Cgroup) -> int | None:
    """Bytes of memory that are left; None if unknown."""
    left = [meminfo().get("MemAvailable")]
    limit = group.memory_limit()
    if limit is not None:  # the usage of the group includes the page cache, which the kernel can free
        left.append(max(limit - tree_nbytes(os.getpid()), 0))
    return min((each for each in left if each is not None), default=None)
