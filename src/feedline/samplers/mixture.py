"""Several datasets mixed in fixed proportions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from feedline.core.kernels import interleave
from feedline.core.rng import derive
from feedline.core.shard_offsets import ShardOffsets
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers.base import IndexSampler, Indices
from feedline.samplers.basic import Shuffled, check_finite, endless
from feedline.samplers.dataset_shares import DatasetShares, SpanDraws

_STOPS = ("first_exhausted", "all_exhausted")


class Mixture(IndexSampler):
    """Positions allocated to datasets by weight.

    Indices are indices of a `ConcatDataset` of the same datasets. For each dataset, `samplers` holds a sampler of its
    indices, or its length, to shuffle it. `sizes` are the lengths of the datasets, needed only for a sampler without an
    `extent`.

    After any number of positions, each dataset has had its share to within a few samples. After every 1,024 positions
    (more where a share is tiny), it is within one sample. The order of the datasets is random, fixed by `seed`. The
    allocation is the same in every epoch; the samples are not.

    `weights` may hold a list for each epoch; the last list applies to all later epochs. `stop` must then be a number.

    `stop`: "first_exhausted" ends the epoch with the last sample of the dataset that runs out first, "all_exhausted"
    with the last sample of the dataset that runs out last (the others start over in a new order), a number after that
    many samples.

    `temperature` T scales each weight w to w ** (1 / T): with sizes as weights, T > 1 draws more from small datasets.
    `max_repeats` bounds how often a sample may repeat in an epoch: the share of a dataset that would exceed it is given
    to the others; `stop` must be a number.
    """

    def __init__(
        self,
        samplers: Sequence[IndexSampler | int],
        weights: Sequence[float] | Sequence[Sequence[float]],
        seed: int = 0,
        stop: str | int = "first_exhausted",
        sizes: Sequence[int] | None = None,
        *,
        temperature: float = 1.0,
        max_repeats: float | None = None,
    ) -> None:
        self.seed = _arguments.seed(seed)
        if isinstance(samplers, Sampler) or not isinstance(samplers, Iterable):
            raise ArgumentError(f"samplers must be a list of lengths or samplers, but is {samplers!r}")
        self.samplers = [_sampler(number, each, self.seed) for number, each in enumerate(samplers)]
        self.temperature, self.max_repeats, self.stop = float(temperature), max_repeats, stop
        rows = {name: self._weights_of(name, row) for name, row in _by_epoch(weights, stop).items()}
        self.weights = rows.get("weights", np.array([*rows.values()]))
        self.sizes = _sizes(self.samplers, sizes)
        self._offsets = ShardOffsets(self.sizes)
        self._starts = np.cumsum(self.sizes) - self.sizes
        self.extent = len(self._offsets)
        self._allocations = [DatasetShares(row, self.seed) for row in rows.values()]
        self.length = self._count_positions()
        most = np.max([each.draws(self.length) for each in self._allocations], axis=0).tolist()
        self._passes = [-(-draws // len(each)) for draws, each in zip(most, self.samplers, strict=True)]

    def _weights_of(self, name: str, weights: Any) -> NDArray[np.float64]:
        """The weights of an epoch, scaled and capped."""
        row = tempered(_arguments.weights(name, weights, "dataset"), self.temperature)
        if len(row) != len(self.samplers):
            raise ArgumentError(f"{len(row)} {name} for {len(self.samplers)} datasets: pass one for each")
        if self.max_repeats is None:
            return row
        return _capped(row, [len(each) for each in self.samplers], self.stop, self.max_repeats)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        return self.drawn(epoch, self.allocation(start, stop, epoch), self._passes)

    def allocation(self, start: int, stop: int, epoch: int = 0) -> SpanDraws:
        """The datasets of positions [start, stop) of an epoch."""
        return self._allocation(epoch).take(start, stop)

    def _allocation(self, epoch: int) -> DatasetShares:
        return self._allocations[min(epoch, len(self._allocations) - 1)]

    def drawn(self, epoch: int, allocation: SpanDraws, passes: Sequence[int]) -> Indices:
        """The indices of the draws of a span.

        `passes` are the epochs of each dataset in one epoch of the mixture.
        """
        owners, firsts, counts = allocation
        spans = zip(self.samplers, passes, firsts.tolist(), counts.tolist(), strict=True)
        parts = [endless(each, epoch * number, first, first + count) for each, number, first, count in spans if count]
        return interleave(owners, np.concatenate(parts), counts, self._starts)

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Dataset number and index within the dataset, int64, for each index."""
        return self._offsets.locate(np.asarray(indices))

    def _count_positions(self) -> int:
        if not isinstance(self.stop, str):
            return _arguments.integer("stop", self.stop, 1, f"or one of {', '.join(_STOPS)}")
        used = np.flatnonzero(self.weights).tolist()
        ends = [self._allocation(0).position(dataset, len(self.samplers[dataset]) - 1) + 1 for dataset in used]
        return min(ends) if _arguments.choice("stop", self.stop, _STOPS) == "first_exhausted" else max(ends)

    def draws(self, epoch: int = 0) -> list[int]:
        """Draws from every dataset in one epoch."""
        return self._allocation(epoch).draws(len(self))


def _by_epoch(weights: Any, stop: str | int) -> dict[str, Any]:
    """The weights of each epoch, or of all epochs, by name."""
    if callable(weights):
        raise ArgumentError(
            "weights is a function, which a resumed run cannot compare: pass a list of weights for each epoch, "
            "[[...], [...]]; the last one applies to all later epochs"
        )
    rows = weights_by_epoch(weights)
    if rows is None:
        return {"weights": weights}
    if isinstance(stop, str):
        raise ArgumentError(
            f"weights for each epoch need stop= as a number of samples, not {stop!r}: all epochs must have one length"
        )
    return {f"weights[{epoch}]": row for epoch, row in enumerate(rows)}


def weights_by_epoch(weights: Any) -> list[Any] | None:
    """The weights of each epoch; None for those of all."""
    rows = list(weights) if isinstance(weights, Iterable) else []
    return rows if any(getattr(row, "ndim", isinstance(row, list | tuple)) for row in rows) else None


def tempered(weights: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Weights scaled by a temperature, with a sum of 1.

    With the sizes of datasets as weights, a temperature of 1 draws in proportion to the sizes, and a large temperature
    draws equally from all datasets (Arivazhagan et al., "Massively multilingual neural machine translation in the
    wild", 2019).
    """
    if not (np.isfinite(temperature) and temperature > 0):
        raise ArgumentError(f"temperature must be above 0, but is {temperature!r}: 1 leaves the weights unchanged")
    if temperature == 1:
        return weights
    scaled: NDArray[np.float64] = np.where(weights > 0, (weights / weights.max()) ** (1.0 / temperature), 0.0)
    normalized: NDArray[np.float64] = scaled / scaled.sum()
    return normalized


def _capped(
    weights: NDArray[np.float64], lengths: Sequence[int], stop: str | int, max_repeats: float
) -> NDArray[np.float64]:
    """Weights with which no dataset gives more than `max_repeats` times its samples."""
    if isinstance(stop, str):
        raise ArgumentError(f"max_repeats= needs stop= as a number of samples, not {stop!r}")
    if not max_repeats >= 1:
        raise ArgumentError(f"max_repeats must be at least 1, but is {max_repeats!r}")
    # The largest share of each dataset. The allocation may exceed a share by two draws at any position.
    most = np.maximum(0.0, np.floor(np.array(lengths) * max_repeats) - 2) / stop
    used = weights > 0
    if most[used].sum() < 1:
        raise ArgumentError(
            f"{stop} samples are more than max_repeats={max_repeats} times the {int(np.array(lengths)[used].sum())} "
            "samples of the datasets: lower stop, or raise max_repeats"
        )
    shares: NDArray[np.float64] = weights / weights.sum()
    fixed = ~used
    while (over := (shares > most) & ~fixed).any():  # the share taken from one may bring another over its bound
        fixed |= over
        shares = np.where(over, most, shares)
        free = ~fixed
        if free.any():
            shares[free] = weights[free] / weights[free].sum() * max(0.0, 1.0 - shares[~free].sum())
    return shares


def _sampler(number: int, source: IndexSampler | int, seed: int) -> IndexSampler:
    name = f"samplers[{number}]"
    if isinstance(source, Sampler):
        return check_finite(name, source)
    length = _arguments.integer(name, source, 1, "pass a dataset's length or its sampler")
    return Shuffled(length, derive(seed, "mixture", number))


def _sizes(samplers: list[IndexSampler], lengths: Sequence[int] | None) -> Indices:
    if lengths is None:
        lengths = [each.extent or 0 for each in samplers]
        if 0 in lengths:
            name = samplers[lengths.index(0)].fingerprint()
            raise ArgumentError(f"{name} does not know the length of its dataset: pass sizes=[len(dataset), ...]")
    sizes = _arguments.integers("sizes", lengths, 1)
    if len(sizes) != len(samplers):
        raise ArgumentError(f"{len(sizes)} sizes for {len(samplers)} datasets: pass one for each")
    for size, each in zip(sizes.tolist(), samplers, strict=True):
        if each.extent is not None and each.extent > size:
            raise ArgumentError(f"{each.fingerprint()} gives indices up to {each.extent}, but its size is {size}")
    return sizes
