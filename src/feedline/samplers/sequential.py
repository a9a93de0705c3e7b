"""In order."""

from __future__ import annotations

import numpy as np

from feedline.samplers import arguments
from feedline.samplers.order import IndexSampler, Indices, describe


class Sequential(IndexSampler):
    """0, 1, ..., n - 1 in every epoch; `n` may be 0, as for torch's `SequentialSampler`."""

    def __init__(self, n: int) -> None:
        self.n = self._length = self.extent = arguments.integer("n", n, 0, "pass len(dataset)")

    def _take(self, epoch: int, start: int, stop: int) -> Indices:  # noqa: ARG002 - every epoch is the same
        return np.arange(start, stop, dtype=np.int64)

    def fingerprint(self) -> str:
        return describe(self, n=self.n)
