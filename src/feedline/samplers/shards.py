"""Shuffling that reads few shards at a time: the shards' order permuted, samples mixed inside a window of shards."""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.errors import ArgumentError
from feedline.rng import derive, permuted
from feedline.samplers import arguments
from feedline.samplers.order import IndexSampler, Indices, Recent, describe

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Mixing:
    """How well a `ShardShuffled` order mixes, expected over the permutations inside its windows."""

    same_shard: float
    """Share of neighbouring positions that come from one shard: 0 is best, 1 is shard after shard."""

    same_shard_ideal: float
    """The same share if all samples were shuffled together: nothing can do better on average."""

    shards_per_batch: float
    """Number of different shards in an average batch that lies within one window."""


class _Layout(NamedTuple):
    """One epoch's shards in the order in which they are read."""

    shards: Indices
    starts: Indices  # position at which each shard of `shards` would start if nothing were mixed, and the end of all
    windows: Indices  # position at which each window starts, and the end of all


class ShardShuffled(IndexSampler):
    """Every index once; indices count through the shards: the first `shard_sizes[0]` of them lie in shard 0, and so on.

    Each epoch permutes the shards, groups `window` of them at a time and permutes the samples of a group, so that at
    any moment at most `window` shards are being read (two groups where a batch crosses from one to the next).
    Memory is in the number of shards, not of samples.
    """

    def __init__(self, shard_sizes: Sequence[int], seed: int = 0, window: int = 16) -> None:
        self.shard_sizes = arguments.integers("shard_sizes", shard_sizes, 0)
        self.seed = arguments.whole("seed", seed)
        self.window = arguments.integer("window", window, 1, "1 reads shard after shard, more mixes better")
        self._firsts = _cumulative(self.shard_sizes)
        self._length = self.extent = int(self._firsts[-1])
        if not self._length:
            raise ArgumentError("shard_sizes are all zero: at least one shard needs a sample")
        self._layout = Recent(self._lay_out)

    def _lay_out(self, epoch: int) -> _Layout:
        shards = permuted(derive(self.seed, epoch, "shards"), len(self.shard_sizes), 0, len(self.shard_sizes))
        starts = _cumulative(self.shard_sizes[shards])
        return _Layout(shards, starts, np.append(starts[: len(shards) : self.window], starts[-1]))

    def _take(self, epoch: int, start: int, stop: int) -> Indices:
        layout: _Layout = self._layout(epoch)
        first = int(layout.windows.searchsorted(start, side="right")) - 1
        last = int(layout.windows.searchsorted(stop, side="left"))
        places: Indices = np.concatenate(
            [self._mixed(layout, epoch, number, start, stop) for number in range(first, last)]
        )
        at = layout.starts.searchsorted(places, side="right") - 1
        return places + (self._firsts[layout.shards] - layout.starts[:-1])[at]

    def _mixed(self, layout: _Layout, epoch: int, number: int, start: int, stop: int) -> Indices:
        low, high = int(layout.windows[number]), int(layout.windows[number + 1])
        key = derive(self.seed, epoch, "window", number)
        return permuted(key, high - low, max(start, low) - low, min(stop, high) - low) + low

    def mixing(self, batch_size: int = 256, epoch: int = 0) -> Mixing:
        """How well `epoch` is mixed; O(shards), without listing any sample."""
        layout: _Layout = self._layout(epoch)
        sizes, totals = self.shard_sizes[layout.shards], np.diff(layout.windows)
        window = np.arange(len(sizes)) // self.window
        # A pair in a window of T is one of T (T - 1), and T - 1 of them are neighbours: T is left of the quotient.
        same = np.bincount(window, sizes * (sizes - 1.0)) / np.maximum(totals, 1)
        neighbours = max(len(self) - 1, 1)
        rows = np.minimum(arguments.integer("batch_size", batch_size, 1), totals)
        present = 1.0 - _absence(sizes, totals[window], rows[window])
        return Mixing(
            same_shard=float(same.sum() / neighbours),
            same_shard_ideal=float((sizes * (sizes - 1.0)).sum() / len(self) / neighbours),
            shards_per_batch=float((present * totals[window]).sum() / len(self)),
        )

    def fingerprint(self) -> str:
        return describe(self, shard_sizes=self.shard_sizes, seed=self.seed, window=self.window)


def _cumulative(sizes: Indices) -> Indices:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _absence(sizes: Indices, totals: Indices, rows: Indices) -> NDArray[np.float64]:
    """Chance that `rows` samples drawn without replacement from `totals` miss a shard of `sizes` samples."""
    others = totals - sizes
    log = _log_choose(np.maximum(others, rows), rows) - _log_choose(totals, rows)
    return np.where(others < rows, 0.0, np.exp(log))


def _log_choose(n: Indices, k: Indices) -> NDArray[np.float64]:
    return np.array([lgamma(a + 1) - lgamma(b + 1) - lgamma(a - b + 1) for a, b in zip(n, k, strict=True)])
