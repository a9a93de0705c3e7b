"""Batches that hold every class."""

from __future__ import annotations

from typing import Any

import numpy as np

from feedline.core.caches import RecentResults
from feedline.core.rng import derive
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers._random import permutations
from feedline.samplers.base import BatchIndexSampler, Indices
from feedline.samplers.weighted import Classes

_GOLDEN = 0.6180339887498949


class StratifiedBatches(BatchIndexSampler):
    """Batches of exactly `batch_size`, each with every class.

    `shares="proportional"`: each class has its share of the labels, rounded up or down from batch to batch, and at
    least one sample per batch. A class with fewer samples than there are batches repeats them. With `drop_last=False`
    every sample is used at least once, and the last batches are completed with repetitions; with `drop_last=True` no
    sample of the other classes is used twice.

    `shares="equal"`: all classes equally often. There are about as many batches as without a sampler; small classes
    repeat, and each epoch shows another part of large ones.

    `labels` has the class of each index. Batches are fixed by `seed` and the epoch.
    """

    def __init__(
        self, labels: Any, batch_size: int, seed: int = 0, drop_last: bool = False, shares: str = "proportional"
    ) -> None:
        self._classes = Classes(labels)
        self.labels = self._classes.labels
        self.batch_size = _arguments.integer("batch_size", batch_size, 1)
        self.seed = _arguments.seed(seed)
        self.drop_last = bool(drop_last)
        self.shares = _arguments.choice("shares", shares, ("proportional", "equal"))
        if self.batch_size < len(self._classes):
            raise ArgumentError(
                f"batch_size is {self.batch_size}, but there are {len(self._classes)} classes: "
                f"a batch that holds every class needs at least {len(self._classes)} samples"
            )
        sizes = self._classes.sizes.tolist()
        if shares == "equal":
            weights, slots, samples = [1] * len(sizes), self.batch_size, sum(sizes)
        else:
            weights, slots = _weights(sizes, self.batch_size)
            samples = sum(weights)
        self.length = samples // slots if drop_last else -(-samples // slots)
        if not self.length:
            raise ArgumentError(f"batch_size {batch_size} leaves no full batch: pass drop_last=False")
        self._starts = _starts(_totals(weights, slots, self.length), self.length)
        self._batches = max(1, 8192 // self.batch_size)
        self._block = RecentResults(self._arrange)

    def batches(self, epoch: int, start: int, stop: int) -> list[Indices]:
        return [np.array(self._block(epoch, n // self._batches)[n % self._batches]) for n in range(start, stop)]

    def _arrange(self, epoch: int, number: int) -> Indices:
        """Block `number` of the epoch's batches, one per row."""
        first, last = number * self._batches, min((number + 1) * self._batches, self.length)
        starts = self._starts[first : last + 1]
        drawn = self._draw(derive(self.seed, epoch, "members"), starts[0], starts[-1])
        before = np.concatenate([[0], np.cumsum(starts[-1] - starts[0])[:-1]])  # draws of the classes before each
        place = _runs((starts[:-1] - starts[0] + before).ravel(), np.diff(starts, axis=0).ravel())
        rows = drawn[place].reshape(-1, self.batch_size)
        order = permutations(derive(self.seed, epoch, "rows"), self.batch_size, first, last)
        return np.take_along_axis(rows, order, axis=1)

    def _draw(self, key: int, low: Indices, high: Indices) -> Indices:
        spans = enumerate(zip(low.tolist(), high.tolist(), strict=True))
        return np.concatenate([self._classes.draws(key, c, start, stop) for c, (start, stop) in spans])


def _weights(sizes: list[int], batch_size: int) -> tuple[list[int], int]:
    """The weight of each class, and the places per batch for them.

    A class that would occur less than once per batch is rare: it has weight 0 and one place in each batch. This makes
    other classes rarer, so the search is repeated until nothing changes.
    """
    weights, slots = list(sizes), batch_size
    while True:
        samples = sum(weights)
        frequent = [size if size * slots >= samples else 0 for size in weights]
        if frequent == weights:
            return weights, slots
        weights, slots = frequent, batch_size - frequent.count(0)


def _totals(weights: list[int], slots: int, batches: int) -> list[int]:
    """Draws of every class in an epoch.

    One per batch for weight 0; the other classes share `slots` per batch, by largest remainder.
    """
    whole, samples = batches * slots, sum(weights)
    totals = [whole * weight // samples for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda c: -(whole * weights[c] % samples))
    for c in by_remainder[: whole - sum(totals)]:
        totals[c] += 1
    return [total if weight else batches for total, weight in zip(totals, weights, strict=True)]


def _starts(totals: list[int], batches: int) -> Indices:
    """Draws of each class before each batch: (batches + 1, classes).

    The last row holds the totals.

    Every batch gets the rounded-down share of each class. To distribute the remaining places evenly, each class has an
    arc of a circle as long as its remainder. Each batch puts its places on the circle at equal distances, at an offset
    of its own; the offsets follow in golden-ratio order. Every class gets exactly its total.
    """
    shares, remainders = np.divmod(np.array(totals, np.int64), batches)
    counts = np.tile(shares, (batches, 1))
    arcs = np.cumsum(remainders)
    turns = ((np.arange(batches) * _GOLDEN) % 1.0).argsort(kind="stable").argsort(kind="stable")
    spare = (np.arange(int(arcs[-1]) // batches) + 1) * batches - turns[:, None]
    counts[np.arange(batches)[:, None], arcs.searchsorted(spare, side="left")] += 1
    return np.concatenate([np.zeros((1, len(totals)), np.int64), np.cumsum(counts, axis=0, dtype=np.int64)])


def _runs(starts: Indices, lengths: Indices) -> Indices:
    """The runs `starts[i], starts[i] + 1, ...` of `lengths[i]` elements, concatenated."""
    before = np.cumsum(lengths) - lengths
    runs: Indices = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return runs
