"""Every index once, in an order that a key decides."""

from __future__ import annotations

from feedline.errors import ArgumentError
from feedline.rng import derive, permuted
from feedline.samplers import arguments
from feedline.samplers.order import LONGEST, IndexSampler, Indices, describe


class Shuffled(IndexSampler):
    """A permutation of `range(n)` for each epoch, evaluated where it is asked for: no memory at any `n`."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n = self._length = self.extent = arguments.integer("n", n, 1, "an empty dataset cannot be shuffled")
        if n >= LONGEST:
            raise ArgumentError(f"n must be below 2**62, but is {n}")
        self.seed = arguments.whole("seed", seed)

    def _take(self, epoch: int, start: int, stop: int) -> Indices:
        return permuted(derive(self.seed, epoch, "shuffle"), self.n, start, stop)

    def fingerprint(self) -> str:
        return describe(self, n=self.n, seed=self.seed)
