"""Orders drawn by weight or by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from feedline.core.caches import RecentResults
from feedline.core.kernels import uniform
from feedline.core.rng import derive
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers._random import endless_permutation, exponential, permutations
from feedline.samplers.base import IndexSampler, Indices, from_blocks


class Weighted(IndexSampler):
    """Random draws in proportion to weights; weight 0 is never drawn.

    `num_samples` draws per epoch, by default one per weight, are fixed by `seed` and the epoch. With replacement every
    draw is computed from its position: O(log n). Without replacement an epoch is computed when it is first read, and
    kept: O(n) time and memory (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006: the order of
    exponential draws divided by the weights).
    """

    def __init__(
        self, weights: Sequence[float], num_samples: int | None = None, replacement: bool = True, seed: int = 0
    ) -> None:
        self.weights = _arguments.weights("weights", weights)
        default = len(self.weights) if replacement else int(np.count_nonzero(self.weights))
        self.num_samples = self.length = _arguments.count("num_samples", num_samples, default)
        self.replacement = bool(replacement)
        self.seed = _arguments.seed(seed)
        self.extent = len(self.weights)
        self._cumulative = np.cumsum(self.weights / self.weights.max())  # the sum of large weights could overflow
        self._drawable: Indices = np.flatnonzero(self.weights).astype(np.int64)
        self._listed = RecentResults(self._list)
        if not replacement and self.num_samples > len(self._drawable):
            raise ArgumentError(
                f"num_samples is {self.num_samples}, but only {len(self._drawable)} weights are above 0: "
                "draw fewer, or with replacement=True"
            )

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        if not self.replacement:
            return np.array(self._listed(epoch)[start:stop])
        level = uniform(derive(self.seed, epoch, "weighted"), start, stop) * self._cumulative[-1]
        drawn = self._cumulative.searchsorted(level, side="right")
        # Rounding can raise a level to the total, which is past the last index.
        indices: Indices = drawn.clip(max=self._drawable[-1])
        return indices

    def _list(self, epoch: int) -> Indices:
        waits = exponential(derive(self.seed, epoch, "unique"), 0, len(self.weights))[self._drawable]
        with np.errstate(over="ignore"):  # tiny weights overflow to infinity, which is last
            waits /= self.weights[self._drawable]
        order = waits.argsort(kind="stable")[: self.num_samples]
        listed: Indices = self._drawable[order]
        return listed


class Classes:
    """The indices of each class among `labels`.

    Labels may be any values that can be sorted; their sorted order numbers the classes.
    """

    def __init__(self, labels: Any) -> None:
        self.labels = _arguments.vector("labels", labels)
        try:
            self.names, numbers = np.unique(self.labels, return_inverse=True)
        except TypeError as error:
            raise ArgumentError(f"labels must be of one type, so that they can be sorted: {error}") from None
        self.sizes: Indices = np.bincount(numbers).astype(np.int64)
        self._members: Indices = numbers.argsort(kind="stable").astype(np.int64)
        self._firsts = np.cumsum(self.sizes) - self.sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def draws(self, key: int, number: int, start: int, stop: int) -> Indices:
        """Draws [start, stop) of a class: its indices, reshuffled again and again."""
        size, first = int(self.sizes[number]), int(self._firsts[number])
        return self._members[first + endless_permutation(derive(key, number), size, start, stop)]


class ClassBalanced(IndexSampler):
    """Random draws with every class equally often.

    `labels` has the class of each index. The draws of an epoch are fixed by `seed` and its number: `num_samples`, by
    default one per label, in rounds that hold every class once in random order. So k rounds hold every class exactly k
    times. A class yields all its samples before it repeats one.
    """

    def __init__(self, labels: Any, num_samples: int | None = None, seed: int = 0) -> None:
        self._classes = Classes(labels)
        self.labels = self._classes.labels
        self.extent = len(self.labels)
        self.num_samples = self.length = _arguments.count("num_samples", num_samples, self.extent)
        self.seed = _arguments.seed(seed)
        self._rounds = max(32, 8192 // len(self._classes))
        self._block = RecentResults(self._arrange)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        return from_blocks(lambda number: self._block(epoch, number), self._rounds * len(self._classes), start, stop)

    def _arrange(self, epoch: int, number: int) -> Indices:
        count, first, last = len(self._classes), number * self._rounds, (number + 1) * self._rounds
        order = permutations(derive(self.seed, epoch, "rounds"), count, first, last)
        key = derive(self.seed, epoch, "members")
        drawn = np.stack([self._classes.draws(key, c, first, last) for c in range(count)], axis=1)
        return np.take_along_axis(drawn, order, axis=1).ravel()
