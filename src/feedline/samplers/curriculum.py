"""Several datasets mixed in proportions that change during an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from feedline.core.rng import derive
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers.base import IndexSampler, Indices
from feedline.samplers.dataset_shares import SpanDraws
from feedline.samplers.mixture import Mixture, weights_by_epoch


class Curriculum(IndexSampler):
    """Mixture in phases, each with its own length and weights.

    A phase is a number of samples and the weights of the datasets in it. Indices, `samplers`, `sizes` and `seed` have
    the same meaning as in `Mixture`. A phase continues each dataset where the earlier ones ended: samples of a dataset
    repeat only after all of them were drawn. An epoch is the sum of the phases. The next epoch continues the datasets,
    too.
    """

    def __init__(
        self,
        samplers: Sequence[IndexSampler | int],
        phases: Sequence[tuple[int, Sequence[float]]],
        seed: int = 0,
        sizes: Sequence[int] | None = None,
    ) -> None:
        if not len(phases):
            raise ArgumentError("phases is empty: a curriculum needs at least one (samples, weights)")
        self.seed = _arguments.seed(seed)
        self.phases = [_phase(number, phase) for number, phase in enumerate(phases)]
        counts = [count for count, _ in self.phases]
        first = Mixture(samplers, [1.0] * len(samplers), self.seed, 1, sizes)
        self.samplers, self.sizes, self.extent = first.samplers, first.sizes, first.extent
        self._mixtures = [self._mixture(first, number) for number in range(len(phases))]
        self._stops = np.cumsum(counts)
        self.length = int(self._stops[-1])
        drawn = np.array([mixture.draws() for mixture in self._mixtures])
        self._drawn_before = np.cumsum(drawn, axis=0) - drawn
        totals = drawn.sum(axis=0).tolist()
        self._passes = [-(-total // len(each)) for total, each in zip(totals, self.samplers, strict=True)]

    def _mixture(self, first: Mixture, number: int) -> Mixture:
        count, weights = self.phases[number]
        if weights_by_epoch(weights) is not None:
            raise ArgumentError(
                f"phases[{number}]: the weights are lists, but phases are the same in every epoch: pass one weight for"
                " each dataset, and more phases for more weights"
            )
        try:
            return Mixture(first.samplers, weights, derive(self.seed, "phase", number), count, first.sizes.tolist())
        except ArgumentError as error:
            raise ArgumentError(f"phases[{number}]: {error}") from None

    def phase(self, position: int) -> int:
        """The number of the phase of a position."""
        return int(self._stops.searchsorted(position, side="right"))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        parts = []
        for number in range(self.phase(start), self.phase(stop - 1) + 1):
            end = int(self._stops[number])
            first = end - self.phases[number][0]
            part = self._mixtures[number].allocation(max(start - first, 0), min(stop, end) - first)
            parts.append(part._replace(firsts=part.firsts + self._drawn_before[number]))
        allocation = parts[0] if len(parts) == 1 else SpanDraws.join(parts)
        return self._mixtures[0].drawn(epoch, allocation, self._passes)


def _phase(number: int, phase: tuple[int, Sequence[float]]) -> tuple[int, Sequence[float]]:
    try:
        count, weights = phase
    except (TypeError, ValueError):
        raise ArgumentError(f"phases[{number}] is {phase!r}: pass (samples, weights)") from None
    return _arguments.integer(f"phases[{number}]", count, 1), weights
