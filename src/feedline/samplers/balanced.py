"""Every class as often as every other."""

from __future__ import annotations

from typing import Any

import numpy as np

from feedline.rng import derive
from feedline.samplers import arguments
from feedline.samplers.classes import Classes
from feedline.samplers.draws import permutations
from feedline.samplers.order import IndexSampler, Indices, Recent, blockwise, describe


class ClassBalanced(IndexSampler):
    """`num_samples` draws an epoch (default: one per label) in rounds that hold every class once, in random order.

    So any k x classes positions that begin with a round hold every class exactly k times. A class gives all its
    samples before it repeats one.
    """

    def __init__(self, labels: Any, num_samples: int | None = None, seed: int = 0) -> None:
        self._classes = Classes(labels)
        self.extent = len(self._classes.labels)
        self.num_samples = self._length = arguments.count("num_samples", num_samples, self.extent)
        self.seed = arguments.whole("seed", seed)
        self._rounds = max(32, 8192 // len(self._classes))
        self._block = Recent(self._arranged)

    def _take(self, epoch: int, start: int, stop: int) -> Indices:
        return blockwise(lambda number: self._block(epoch, number), self._rounds * len(self._classes), start, stop)

    def _arranged(self, epoch: int, number: int) -> Indices:
        count, first, last = len(self._classes), number * self._rounds, (number + 1) * self._rounds
        order = permutations(derive(self.seed, epoch, "rounds"), count, first, last)
        key = derive(self.seed, epoch, "members")
        drawn = np.stack([self._classes.draws(key, c, first, last) for c in range(count)], axis=1)
        return np.take_along_axis(drawn, order, axis=1).ravel()

    def fingerprint(self) -> str:
        return describe(self, labels=self._classes.labels, num_samples=self.num_samples, seed=self.seed)
