"""Indices drawn in proportion to weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from feedline.errors import ArgumentError
from feedline.rng import derive
from feedline.samplers import arguments
from feedline.samplers.draws import exponential, uniform
from feedline.samplers.order import IndexSampler, Indices, Recent, describe

if TYPE_CHECKING:
    from collections.abc import Sequence


class Weighted(IndexSampler):
    """`num_samples` draws an epoch (default: one per weight), index i in proportion to `weights[i]`; 0 is never drawn.

    With replacement every draw is addressed by its position: O(log n). Without, an epoch is listed when it is first
    asked for and kept: O(n) time and memory (Efraimidis and Spirakis, "Weighted random sampling with a reservoir",
    2006: the order of exponential draws divided by the weights).
    """

    def __init__(
        self, weights: Sequence[float], num_samples: int | None = None, replacement: bool = True, seed: int = 0
    ) -> None:
        self.weights = arguments.weights("weights", weights)
        default = len(self.weights) if replacement else int(np.count_nonzero(self.weights))
        self.num_samples = self._length = arguments.count("num_samples", num_samples, default)
        self.replacement = bool(replacement)
        self.seed = arguments.whole("seed", seed)
        self.extent = len(self.weights)
        self._cumulative = np.cumsum(self.weights / self.weights.max())  # their sum itself may be too large
        self._drawable: Indices = np.flatnonzero(self.weights).astype(np.int64)
        self._listed = Recent(self._list)
        if not replacement and self.num_samples > len(self._drawable):
            raise ArgumentError(
                f"num_samples is {self.num_samples}, but only {len(self._drawable)} weights are above 0: "
                "draw fewer, or with replacement=True"
            )

    def _take(self, epoch: int, start: int, stop: int) -> Indices:
        if not self.replacement:
            return np.array(self._listed(epoch)[start:stop])
        level = uniform(derive(self.seed, epoch, "weighted"), start, stop) * self._cumulative[-1]
        drawn = self._cumulative.searchsorted(level, side="right")
        # A level that was rounded up to the total lies past the last index.
        indices: Indices = drawn.clip(max=self._drawable[-1])
        return indices

    def _list(self, epoch: int) -> Indices:
        waits = exponential(derive(self.seed, epoch, "unique"), 0, len(self.weights))[self._drawable]
        with np.errstate(over="ignore"):  # of tiny weights: infinite, and last
            waits /= self.weights[self._drawable]
        order = waits.argsort(kind="stable")[: self.num_samples]
        listed: Indices = self._drawable[order]
        return listed

    def fingerprint(self) -> str:
        return describe(
            self, weights=self.weights, num_samples=self.num_samples, replacement=self.replacement, seed=self.seed
        )
