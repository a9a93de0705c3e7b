"""Several datasets mixed in fixed proportions."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from feedline.core.caches import RecentResults
from feedline.core.rng import derive
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers._random import uniform
from feedline.samplers.base import IndexSampler, Indices, blockwise
from feedline.samplers.basic import Shuffled, endless, finite

if TYPE_CHECKING:
    from collections.abc import Sequence


_STOPS = ("first_exhausted", "all_exhausted")


_SMALLEST_SHARE = 2.0**-20


class _AllocationBlock(NamedTuple):
    """One block of the allocation of positions to datasets.

    `datasets` holds the dataset of each position; `draws` the number of that draw among all draws from the dataset,
    counted from 0.
    """

    datasets: Indices
    draws: Indices


class Mixture(IndexSampler):
    """Positions allocated to datasets by weight.

    Indices are those of a `ConcatDataset` of the same datasets. `samplers` holds the length of each dataset, which is
    then shuffled, or a sampler of its indices. `sizes` are the lengths of the datasets, needed only where a sampler
    does not know its `extent`.

    After any number of positions each dataset has had its share to within a few samples, and to within one after every
    1,024 (or more where a share is tiny). The order of the datasets is random. The allocation is the same in every
    epoch; the samples are not.

    `stop`: "first_exhausted" ends the epoch with the last sample of the dataset that runs out first, "all_exhausted"
    with that of the dataset that runs out last (the others start over in a new order), a number after that many
    samples.
    """

    def __init__(
        self,
        samplers: Sequence[IndexSampler | int],
        weights: Sequence[float],
        seed: int = 0,
        stop: str | int = "first_exhausted",
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.seed = _arguments.whole("seed", seed)
        self.samplers = [_sampler(number, each, self.seed) for number, each in enumerate(samplers)]
        self.weights = _arguments.weights("weights", weights)
        if len(self.weights) != len(self.samplers):
            raise ArgumentError(f"{len(self.weights)} weights for {len(self.samplers)} datasets: pass one for each")
        self.sizes = _sizes(self.samplers, sizes)
        self._offsets = np.cumsum(self.sizes) - self.sizes
        self.extent = int(self.sizes.sum())
        exact = [Fraction(weight) for weight in self.weights.tolist()]
        total = sum(exact)
        shares = [weight / total for weight in exact]
        self._block_size = _block_size(shares)
        self._bounds = [Fraction(0), *accumulate(shares)]
        self._block = RecentResults(self._allocate, keep=8)
        self.stop = stop
        self.length = self._count_positions()
        self._passes = [-(-draws // len(each)) for draws, each in zip(self._draws(), self.samplers, strict=True)]

    def _before(self, block: int) -> Indices:
        """Draws from every dataset before that block.

        Exact shares, rounded so that they add up to the position.
        """
        position = block * self._block_size
        return np.diff([bound.numerator * position // bound.denominator for bound in self._bounds])

    def _allocate(self, block: int) -> _AllocationBlock:
        """The allocation of one block.

        The block is a circle. A dataset with n draws cuts it into n equal parts and puts one draw at a random place in
        each. The first part of each dataset begins at a random place: if two datasets cut at the same places, they
        would alternate.
        """
        before = self._before(block)
        counts = self._before(block + 1) - before
        owner = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(self._block_size) - np.repeat(np.cumsum(counts) - counts, counts)
        jitter = uniform(derive(self.seed, "jitter", block), 0, self._block_size)
        begin = uniform(derive(self.seed, "begin", block), 0, len(counts))[owner]
        places = ((within + jitter) / counts[owner] + begin) % 1.0
        datasets = owner[places.argsort(kind="stable")]
        draws = np.empty(self._block_size, np.int64)
        draws[datasets.argsort(kind="stable")] = before[owner] + within
        return _AllocationBlock(datasets, draws)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        owner = blockwise(lambda number: self._block(number).datasets, self._block_size, start, stop)
        draws = blockwise(lambda number: self._block(number).draws, self._block_size, start, stop)
        indices = np.empty(stop - start, np.int64)
        for dataset in np.unique(owner).tolist():
            mine = owner == dataset
            drawn = draws[mine]  # consecutive
            first_epoch = epoch * self._passes[dataset]
            part = endless(self.samplers[dataset], first_epoch, int(drawn[0]), int(drawn[-1]) + 1)
            indices[mine] = self._offsets[dataset] + part
        return indices

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """The dataset number and the index within the dataset, for each index."""
        datasets = (self._offsets + self.sizes).searchsorted(indices, side="right")
        return datasets, np.asarray(indices) - self._offsets[datasets]

    def _count_positions(self) -> int:
        if not isinstance(self.stop, str):
            return _arguments.integer("stop", self.stop, 1, f"or one of {', '.join(_STOPS)}")
        used = np.flatnonzero(self.weights).tolist()
        ends = [self._position(dataset, len(self.samplers[dataset]) - 1) + 1 for dataset in used]
        return min(ends) if _arguments.choice("stop", self.stop, _STOPS) == "first_exhausted" else max(ends)

    def _position(self, dataset: int, draw: int) -> int:
        """The position of a draw from a dataset."""
        share = self._bounds[dataset + 1] - self._bounds[dataset]
        blocks = range(int((draw + 2) / share) // self._block_size + 2)
        block = bisect_right(blocks, draw, key=lambda number: int(self._before(number)[dataset])) - 1
        datasets, draws = self._allocate(block)
        return block * self._block_size + int(((datasets == dataset) & (draws == draw)).argmax())

    def _draws(self) -> list[int]:
        """Draws from every dataset in one epoch."""
        block, within = divmod(len(self), self._block_size)
        part = np.bincount(self._allocate(block).datasets[:within], minlength=len(self.samplers))
        draws: list[int] = (self._before(block) + part).tolist()
        return draws


def _sampler(number: int, source: IndexSampler | int, seed: int) -> IndexSampler:
    name = f"samplers[{number}]"
    if isinstance(source, Sampler):
        return finite(name, source)
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


def _block_size(shares: list[Fraction]) -> int:
    smallest = min(share for share in shares if share)
    if smallest < _SMALLEST_SHARE:
        raise ArgumentError(
            f"weights[{shares.index(smallest)}] is {float(smallest):.1e} of the sum; less than a millionth cannot be "
            "allocated: raise it, or pass 0 to leave the dataset out"
        )
    return max(1024, 1 << ceil(1 / smallest).bit_length())
