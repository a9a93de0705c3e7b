"""A part of a dataset, in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from feedline.errors import ArgumentError
from feedline.samplers import arguments
from feedline.samplers.endless import finite
from feedline.samplers.order import IndexSampler, Indices, describe
from feedline.samplers.sequential import Sequential

if TYPE_CHECKING:
    from collections.abc import Sequence


class Subset(IndexSampler):
    """`indices` in the order of `sampler`, which counts through them: `Shuffled(len(indices))`; default: as they stand.

    A train and validation split without wrapping the dataset.
    """

    def __init__(self, indices: Sequence[int], sampler: IndexSampler | None = None) -> None:
        self.indices = arguments.integers("indices", indices, 0)
        self.sampler = Sequential(len(self.indices)) if sampler is None else finite("sampler", sampler)
        self._length = len(self.sampler)
        if self.sampler.extent is None or self.sampler.extent > len(self.indices):
            raise ArgumentError(
                f"{self.sampler.fingerprint()} counts up to {self.sampler.extent}, but there are {len(self.indices)} "
                f"indices: pass a sampler of range({len(self.indices)})"
            )

    def _take(self, epoch: int, start: int, stop: int) -> Indices:
        return self.indices[self.sampler.take(epoch, start, stop)]

    def fingerprint(self) -> str:
        return describe(self, indices=self.indices, sampler=self.sampler)
