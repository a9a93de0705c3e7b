"""One epoch after the other without an end, and epochs of any chosen size cut out of that."""

from __future__ import annotations

import numpy as np

from feedline.errors import ArgumentError
from feedline.samplers import arguments
from feedline.samplers.order import IndexSampler, Indices, describe


def endless(sampler: IndexSampler, epoch: int, start: int, stop: int) -> Indices:
    """Positions [start, stop) of the order that `epoch` and all later epochs of `sampler` make one after the other."""
    length = len(sampler)
    spans = ((e, max(start - e * length, 0), stop - e * length) for e in range(start // length, -(-stop // length)))
    return np.concatenate([np.empty(0, np.int64), *(sampler.take(epoch + e, low, high) for e, low, high in spans)])


def finite(name: str, sampler: object) -> IndexSampler:
    """`sampler` itself, if it has random access and a length above 0."""
    if not isinstance(sampler, IndexSampler):
        raise ArgumentError(
            f"{name} must be one of feedline's samplers of indices, but is a {type(sampler).__name__}: "
            "foreign samplers and batch samplers have no random access; give them to the loader as they are"
        )
    if isinstance(sampler, Infinite):
        raise ArgumentError(f"{name} is endless already: pass the sampler inside it")
    if not len(sampler):
        raise ArgumentError(f"{name} is empty: {sampler.fingerprint()}")
    return sampler


class Infinite(IndexSampler):
    """A single endless epoch: the epochs of `sampler` one after the other. `len()` raises TypeError, as torch expects.

    Epoch e of it begins with epoch e of `sampler`, so `set_epoch` chooses where `iter()` begins.
    """

    _length = None

    def __init__(self, sampler: IndexSampler) -> None:
        self.sampler = finite("sampler", sampler)
        self.extent = sampler.extent

    def _take(self, epoch: int, start: int, stop: int) -> Indices:
        return endless(self.sampler, epoch, start, stop)

    def fingerprint(self) -> str:
        return describe(self, whole=self.sampler)


class VirtualEpochs(IndexSampler):
    """Epochs of `num_samples` each, cut one after the other out of the endless order of `sampler`'s epochs."""

    def __init__(self, sampler: IndexSampler, num_samples: int) -> None:
        self.sampler = finite("sampler", sampler)
        self.num_samples = self._length = arguments.integer("num_samples", num_samples, 1)
        self.extent = sampler.extent

    def _take(self, epoch: int, start: int, stop: int) -> Indices:
        return endless(self.sampler, 0, epoch * self.num_samples + start, epoch * self.num_samples + stop)

    def fingerprint(self) -> str:
        return describe(self, whole=self.sampler, num_samples=self.num_samples)
