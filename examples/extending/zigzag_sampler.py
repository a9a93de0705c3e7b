"""A sampler from outside: forward in even epochs, backward in odd ones."""

from __future__ import annotations

import numpy as np

from feedline.samplers import IndexSampler


class Zigzag(IndexSampler):
    """Indices 0 to `n` - 1, in reverse order in every second epoch."""

    def __init__(self, n: int) -> None:
        self.n = self.length = self.extent = n

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The indices at positions [start, stop); the base class has checked the span."""
        positions = np.arange(start, stop, dtype=np.int64)
        return positions if epoch % 2 == 0 else self.n - 1 - positions
