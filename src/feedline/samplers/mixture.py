"""Several datasets mixed in fixed proportions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from feedline.core.caches import RecentResults
from feedline.core.kernels import interleave, mixture_blocks
from feedline.core.rng import derive
from feedline.core.shard_offsets import ShardOffsets
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers.base import LONGEST, IndexSampler, Indices, from_blocks
from feedline.samplers.basic import Shuffled, check_finite, endless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


_STOPS = ("first_exhausted", "all_exhausted")


_SMALLEST_SHARE = 2.0**-20


_TABLE_ITEMS = 1024
"""Numbers of a table of draws, about: small enough to be made within a batch, large enough to be made seldom."""


_FEW = 2
"""Blocks of a span up to which they are kept: the next span may begin in the last of them."""


class SpanDraws(NamedTuple):
    """Datasets of the positions of a span.

    `owners` holds the dataset of each position, int32. `counts` are the draws from each dataset in the span, and
    `firsts` the number of the first of them, counted from 0 at position 0. A dataset without draws in the span has a
    `first` that is not below its next draw.
    """

    owners: NDArray[np.int32]
    firsts: Indices
    counts: Indices

    @classmethod
    def join(cls, parts: Sequence[SpanDraws]) -> SpanDraws:
        """The allocation of spans that follow one another."""
        owners, firsts, counts = zip(*parts, strict=True)
        return cls(np.concatenate(owners), np.min(firsts, axis=0), np.sum(counts, axis=0))


class _MixtureBlock(NamedTuple):
    """Dataset of each position of a block, and its draw's number."""

    owners: NDArray[np.int32]
    draws: Indices


class Mixture(IndexSampler):
    """Positions allocated to datasets by weight.

    Indices are those of a `ConcatDataset` of the same datasets. For each dataset, `samplers` holds a sampler of its
    indices, or its length, to shuffle it. `sizes` are the lengths of the datasets, needed only where a sampler does not
    know its `extent`.

    After any number of positions, each dataset has had its share to within a few samples. After every 1,024 positions
    (more where a share is tiny), it is within one sample. The order of the datasets is random, fixed by `seed`. The
    allocation is the same in every epoch; the samples are not.

    `stop`: "first_exhausted" ends the epoch with the last sample of the dataset that runs out first, "all_exhausted"
    with that of the dataset that runs out last (the others start over in a new order), a number after that many
    samples.

    `temperature` T scales each weight w to w ** (1 / T): with sizes as weights, T > 1 draws more from small datasets.
    `max_repeats` bounds how often a sample may come in an epoch: the share of a dataset that would exceed it is given
    to the others; `stop` must be a number.
    """

    def __init__(
        self,
        samplers: Sequence[IndexSampler | int],
        weights: Sequence[float],
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
        self.weights = tempered(_arguments.weights("weights", weights, "dataset"), temperature)
        self.temperature, self.max_repeats = float(temperature), max_repeats
        if len(self.weights) != len(self.samplers):
            raise ArgumentError(f"{len(self.weights)} weights for {len(self.samplers)} datasets: pass one for each")
        if max_repeats is not None:
            self.weights = _capped(self.weights, [len(each) for each in self.samplers], stop, max_repeats)
        self.sizes = _sizes(self.samplers, sizes)
        self._offsets = ShardOffsets(self.sizes)
        self._starts = np.cumsum(self.sizes) - self.sizes
        self.extent = len(self._offsets)
        exact = [Fraction(weight) for weight in self.weights.tolist()]
        total = sum(exact)
        shares = [weight / total for weight in exact]
        self._block_size = _block_size(shares)
        self._shares = shares
        self._bounds = [bound.as_integer_ratio() for bound in (Fraction(0), *accumulate(shares))]
        self._table_blocks = max(1, _TABLE_ITEMS // len(shares))
        self._table = RecentResults(self._make_table)
        self._keys = derive(self.seed, "jitter"), derive(self.seed, "begin")
        self._block = RecentResults(self._make_block, keep=8)
        self.stop = stop
        self.length = self._count_positions()
        self._passes = [-(-draws // len(each)) for draws, each in zip(self.draws(), self.samplers, strict=True)]

    def _make_table(self, number: int) -> Indices:
        """Draws from every dataset before each of the blocks of a table.

        Exact shares, rounded so that they add up to the position.
        """
        # Whole numbers: floats would be off by a draw far into an endless order, and blocks would overlap.
        size, blocks = self._block_size, self._table_blocks
        denominators = [denominator for _, denominator in self._bounds]
        dtype = np.int64 if max(denominators) * blocks < 1 << 63 else object  # Python's integers
        begin, step = (
            np.array([divmod(each * position, of) for each, of in self._bounds], dtype).T
            for position in (number * blocks * size, size)
        )
        after = np.arange(blocks).astype(dtype)[:, None]
        (first, rests), (more, more_rests) = begin, step
        ends = first + after * more + (rests + after * more_rests) // np.array(denominators, dtype)
        before: Indices = np.diff(ends).astype(np.int64, copy=False)
        return before

    def _before(self, blocks: range) -> Indices:
        """Draws from every dataset before each block, and after the last."""
        return from_blocks(self._table, self._table_blocks, blocks.start, blocks.stop + 1)

    def _owners(self, blocks: range, before: Indices) -> NDArray[np.int32]:
        """The dataset of each position of those blocks."""
        return mixture_blocks(np.diff(before, axis=0), blocks.start, self._keys)

    def _make_block(self, number: int) -> _MixtureBlock:
        blocks = range(number, number + 1)
        before = self._before(blocks)
        owners, counts = self._owners(blocks, before), before[1] - before[0]
        draws = np.arange(len(owners))  # each dataset's after those of the one before
        return _MixtureBlock(owners, interleave(owners, draws, counts, before[1] - np.cumsum(counts)))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        return self.drawn(epoch, self.allocation(start, stop), self._passes)

    def allocation(self, start: int, stop: int) -> SpanDraws:
        """The datasets of positions [start, stop)."""
        size = self._block_size
        blocks = range(start // size, (stop - 1) // size + 1)
        if len(blocks) <= _FEW:
            return self._kept_allocation(blocks, start, stop)
        before = self._before(blocks)  # one call for all: a loader asks for many positions at once
        owners = self._owners(blocks, before)
        head, tail = start - blocks.start * size, stop - blocks.start * size
        firsts = before[0] + self._count(owners[:head])
        return SpanDraws(owners[head:tail], firsts, before[-1] - self._count(owners[tail:]) - firsts)

    def _kept_allocation(self, numbers: range, start: int, stop: int) -> SpanDraws:
        """The allocation of a span in blocks that are kept.

        Its time does not grow with the size of a block.
        """
        blocks = {number: self._block(number) for number in numbers}
        owners = from_blocks(lambda number: blocks[number].owners, self._block_size, start, stop)
        draws = from_blocks(lambda number: blocks[number].draws, self._block_size, start, stop)
        firsts = np.full(len(self.samplers), LONGEST)
        np.minimum.at(firsts, owners, draws)
        return SpanDraws(owners, firsts, self._count(owners))

    def _count(self, owners: NDArray[np.int32]) -> Indices:
        """The positions of each dataset."""
        return np.bincount(owners, minlength=len(self.samplers))

    def drawn(self, epoch: int, allocation: SpanDraws, passes: Sequence[int]) -> Indices:
        """The indices of the draws of a span.

        `passes` are the epochs of each dataset in one epoch of the mixture.
        """
        owners, firsts, counts = allocation
        spans = zip(self.samplers, passes, firsts.tolist(), counts.tolist(), strict=True)
        parts = [endless(each, epoch * number, first, first + count) for each, number, first, count in spans if count]
        return interleave(owners, np.concatenate(parts), counts, self._starts)

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """The dataset number and the index within the dataset, for each index."""
        return self._offsets.locate(np.asarray(indices))

    def _count_positions(self) -> int:
        if not isinstance(self.stop, str):
            return _arguments.integer("stop", self.stop, 1, f"or one of {', '.join(_STOPS)}")
        used = np.flatnonzero(self.weights).tolist()
        ends = [self._position(dataset, len(self.samplers[dataset]) - 1) + 1 for dataset in used]
        return min(ends) if _arguments.choice("stop", self.stop, _STOPS) == "first_exhausted" else max(ends)

    def _position(self, dataset: int, draw: int) -> int:
        """The position of a draw from a dataset."""
        numbers = range(int((draw + 2) / self._shares[dataset]) // self._block_size + 2)
        (low, of_low), (high, of_high) = self._bounds[dataset : dataset + 2]

        def before(number: int) -> int:
            position = number * self._block_size
            return high * position // of_high - low * position // of_low

        number = bisect_right(numbers, draw, key=before) - 1
        owners, draws = self._make_block(number)
        return number * self._block_size + int(((owners == dataset) & (draws == draw)).argmax())

    def draws(self) -> list[int]:
        """Draws from every dataset in one epoch."""
        number, within = divmod(len(self), self._block_size)
        blocks = range(number, number + 1)
        before = self._before(blocks)
        draws: list[int] = (before[0] + self._count(self._owners(blocks, before)[:within])).tolist()
        return draws


def tempered(weights: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Weights scaled by a temperature, with a sum of 1.

    With the sizes of datasets as weights, 1 draws in proportion to them, and a large temperature equally (Arivazhagan
    et al., "Massively multilingual neural machine translation in the wild", 2019).
    """
    if not (np.isfinite(temperature) and temperature > 0):
        raise ArgumentError(f"temperature must be above 0, but is {temperature!r}: 1 leaves the weights as they are")
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
    while (over := (shares > most) & ~fixed).any():  # what one gives up may bring another one over its bound
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


def _block_size(shares: list[Fraction]) -> int:
    smallest = min(share for share in shares if share)
    if smallest < _SMALLEST_SHARE:
        raise ArgumentError(
            f"weights[{shares.index(smallest)}] is {float(smallest):.1e} of the sum; less than a millionth cannot be "
            "allocated: raise it, or pass 0 to leave the dataset out"
        )
    return max(1024, 1 << ceil(1 / smallest).bit_length())
