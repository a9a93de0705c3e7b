"""Positions of a mixture, allocated to datasets by weight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import RecentResults
from feedline.core.kernels import interleave, mixture_blocks
from feedline.core.rng import derive
from feedline.errors import ArgumentError
from feedline.samplers.base import LONGEST, Indices, from_blocks

_SMALLEST_SHARE = 2.0**-20


_TABLE_ITEMS = 1024
"""Approximate number of entries in a table of draws: small enough to be computed within a batch, and large enough that
tables are rarely computed.
"""


_FEW = 2
"""Most blocks of a span that are kept: the next span may begin in the last block."""


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


class DatasetShares:
    """Allocation of positions to datasets by weight, the same in every epoch.

    `ArgumentError` for weights that cannot be allocated.
    """

    def __init__(self, weights: NDArray[np.float64], seed: int) -> None:
        exact = [Fraction(weight) for weight in weights.tolist()]
        total = sum(exact)
        shares = [weight / total for weight in exact]
        self._block_size = _block_size(shares)
        self._shares = shares
        self._bounds = [bound.as_integer_ratio() for bound in (Fraction(0), *accumulate(shares))]
        self._table_blocks = max(1, _TABLE_ITEMS // len(shares))
        self._table = RecentResults(self._make_table)
        self._keys = derive(seed, "jitter"), derive(seed, "begin")
        self._block = RecentResults(self._make_block, keep=8)

    def take(self, start: int, stop: int) -> SpanDraws:
        """The datasets of positions [start, stop)."""
        size = self._block_size
        blocks = range(start // size, (stop - 1) // size + 1)
        if len(blocks) <= _FEW:
            return self._kept_allocation(blocks, start, stop)
        before = self._before(blocks)  # one call for all: a loader requests many positions at once
        owners = self._owners(blocks, before)
        head, tail = start - blocks.start * size, stop - blocks.start * size
        firsts = before[0] + self._count(owners[:head])
        return SpanDraws(owners[head:tail], firsts, before[-1] - self._count(owners[tail:]) - firsts)

    def _kept_allocation(self, numbers: range, start: int, stop: int) -> SpanDraws:
        """The allocation of a span within blocks that are kept.

        The time does not grow with the size of a block.
        """
        blocks = {number: self._block(number) for number in numbers}
        owners = from_blocks(lambda number: blocks[number].owners, self._block_size, start, stop)
        draws = from_blocks(lambda number: blocks[number].draws, self._block_size, start, stop)
        firsts = np.full(len(self._shares), LONGEST)
        np.minimum.at(firsts, owners, draws)
        return SpanDraws(owners, firsts, self._count(owners))

    def _count(self, owners: NDArray[np.int32]) -> Indices:
        """The positions of each dataset."""
        return np.bincount(owners, minlength=len(self._shares))

    def position(self, dataset: int, draw: int) -> int:
        """The position of a draw from a dataset."""
        numbers = range(int((draw + 2) / self._shares[dataset]) // self._block_size + 2)
        (low, of_low), (high, of_high) = self._bounds[dataset : dataset + 2]

        def before(number: int) -> int:
            position = number * self._block_size
            return high * position // of_high - low * position // of_low

        number = bisect_right(numbers, draw, key=before) - 1
        owners, draws = self._make_block(number)
        return number * self._block_size + int(((owners == dataset) & (draws == draw)).argmax())

    def draws(self, length: int) -> list[int]:
        """Draws from every dataset in the first `length` positions."""
        number, within = divmod(length, self._block_size)
        blocks = range(number, number + 1)
        before = self._before(blocks)
        draws: list[int] = (before[0] + self._count(self._owners(blocks, before)[:within])).tolist()
        return draws

    def _make_table(self, number: int) -> Indices:
        """Draws from every dataset before each of the blocks of a table.

        Exact shares, rounded so that they add up to the position.
        """
        # Integers: at high positions of an endless order, floats would be off by a draw, and blocks would overlap.
        size, blocks = self._block_size, self._table_blocks
        denominators = [denominator for _, denominator in self._bounds]
        dtype = np.int64 if max(denominators) * blocks < 1 << 63 else object  # integers of Python cannot overflow
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
        draws = np.arange(len(owners))  # the draws of each dataset, after those of the previous dataset
        return _MixtureBlock(owners, interleave(owners, draws, counts, before[1] - np.cumsum(counts)))


def _block_size(shares: list[Fraction]) -> int:
    smallest = min(share for share in shares if share)
    if smallest < _SMALLEST_SHARE:
        raise ArgumentError(
            f"weights[{shares.index(smallest)}] is {float(smallest):.1e} of the sum; less than a millionth cannot be "
            "allocated: raise it, or pass 0 to leave the dataset out"
        )
    return max(1024, 1 << ceil(1 / smallest).bit_length())
