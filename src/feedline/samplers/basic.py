"""Sequential and shuffled orders, subsets, and epochs cut to other lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from feedline.core.rng import derive, permuted
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers.base import LONGEST, IndexSampler, Indices


class Shuffled(IndexSampler):
    """A new permutation of `range(n)` in each epoch.

    It is fixed by `seed` and the epoch. Positions are computed on demand: the memory does not grow with `n`.
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n = self.length = self.extent = _arguments.integer("n", n, 1, "an empty dataset cannot be shuffled")
        if n >= LONGEST:
            raise ArgumentError(f"n must be below 2**62, but is {n}")
        self.seed = _arguments.seed(seed)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        return permuted(derive(self.seed, epoch, "shuffle"), self.n, start, stop)


class Sequential(IndexSampler):
    """The indices of `range(n)` in every epoch; `n` may be 0."""

    def __init__(self, n: int) -> None:
        self.n = self.length = self.extent = _arguments.integer("n", n, 0, "pass len(dataset)")

    def fingerprint(self) -> str:
        # A loader makes such a sampler for each epoch, unless the user passes one.
        return f"Sequential(n={self.n})" if type(self) is Sequential else super().fingerprint()

    def indices(self, epoch: int, start: int, stop: int) -> Indices:  # noqa: ARG002 - every epoch is the same
        return np.arange(start, stop, dtype=np.int64)


def endless(sampler: IndexSampler, epoch: int, start: int, stop: int) -> Indices:
    """Positions [start, stop) of the concatenation of the sampler's epochs.

    Position 0 is the start of `epoch`.
    """
    length = len(sampler)
    first = start // length
    if stop <= (first + 1) * length:  # within one epoch, like nearly all spans: the indices need no copy
        return sampler.take(epoch + first, start - first * length, stop - first * length)
    spans = ((e, max(start - e * length, 0), stop - e * length) for e in range(start // length, -(-stop // length)))
    return np.concatenate([np.empty(0, np.int64), *(sampler.take(epoch + e, low, high) for e, low, high in spans)])


def check_finite(name: str, sampler: object) -> IndexSampler:
    """`sampler` itself, if it has random access and a length above 0."""
    if not isinstance(sampler, IndexSampler):
        raise ArgumentError(
            f"{name} must be one of feedline's samplers of indices, but is a {type(sampler).__name__}: "
            "foreign samplers and batch samplers have no random access; pass them to the loader directly"
        )
    if isinstance(sampler, Infinite):
        raise ArgumentError(f"{name} is already endless: pass the sampler that it wraps")
    if not len(sampler):
        raise ArgumentError(f"{name} is empty: {sampler.fingerprint()}")
    return sampler


class Infinite(IndexSampler):
    """A single endless epoch: all epochs of `sampler`, one after another.

    Epoch e begins with epoch e of `sampler`, so `set_epoch` chooses where `iter()` begins. `len()` raises TypeError, as
    torch expects.
    """

    length = None

    def __init__(self, sampler: IndexSampler) -> None:
        self.sampler = check_finite("sampler", sampler)
        self.extent = sampler.extent

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        return endless(self.sampler, epoch, start, stop)


class VirtualEpochs(IndexSampler):
    """Epochs of `num_samples` each, cut from the endless order of `sampler`.

    No sample is left out or repeated between two epochs.
    """

    def __init__(self, sampler: IndexSampler, num_samples: int) -> None:
        self.sampler = check_finite("sampler", sampler)
        self.num_samples = self.length = _arguments.integer("num_samples", num_samples, 1)
        self.extent = sampler.extent

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        return endless(self.sampler, 0, epoch * self.num_samples + start, epoch * self.num_samples + stop)


class Subset(IndexSampler):
    """Some indices of a dataset: a split without a wrapper.

    `sampler` orders `range(len(indices))`, such as `Shuffled(len(indices))`; by default the indices keep their order.
    """

    def __init__(self, indices: Sequence[int], sampler: IndexSampler | None = None) -> None:
        self._indices = _arguments.integers("indices", indices, 0)
        self.sampler = Sequential(len(self._indices)) if sampler is None else check_finite("sampler", sampler)
        self.length = len(self.sampler)
        if self.sampler.extent is None or self.sampler.extent > len(self._indices):
            raise ArgumentError(
                f"{self.sampler.fingerprint()} counts up to {self.sampler.extent}, but there are {len(self._indices)} "
                f"indices: pass a sampler of range({len(self._indices)})"
            )

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        return self._indices[self.sampler.take(epoch, start, stop)]
