"""Shuffling that reads few shards at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.rng import derive, permuted
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers.base import IndexSampler, Indices, RecentResults

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Mixing:
    """Mixing of a `ShardShuffled` order's batches, as expected values."""

    same_shard_pairs: float
    """Fraction of the pairs of samples in a batch that come from one shard.

    1 if every batch comes from a single shard.
    """

    same_shard_pairs_ideal: float
    """The same fraction for a full shuffle."""

    shards_per_batch: float
    """Number of distinct shards in a batch, averaged over the batches."""


class _EpochShards(NamedTuple):
    """The shards of one epoch, in reading order."""

    shards: Indices
    starts: Indices  # start of each shard in `shards` before mixing, and the end of the epoch
    windows: Indices  # start of each window, and the end of the epoch


class ShardShuffled(IndexSampler):
    """Every index once, shuffled within a moving window of shards.

    Indices count through the shards: the first `shard_sizes[0]` of them are those of shard 0, and so on. Each epoch
    permutes the shards, groups `window` of them at a time, and permutes the samples of each group. So at most `window`
    shards are read at any moment (two groups in a batch that crosses from one to the next). Memory is proportional to
    the number of shards, not of samples.
    """

    def __init__(self, shard_sizes: Sequence[int], seed: int = 0, window: int = 16) -> None:
        self.shard_sizes = _arguments.integers("shard_sizes", shard_sizes, 0)
        self.seed = _arguments.whole("seed", seed)
        self.window = _arguments.integer("window", window, 1, "1 reads shard after shard, more mixes better")
        self._firsts = _cumulative(self.shard_sizes)
        self.length = self.extent = int(self._firsts[-1])
        if not self.length:
            raise ArgumentError("shard_sizes are all zero: at least one shard needs a sample")
        self._layout = RecentResults(self._lay_out)

    def _lay_out(self, epoch: int) -> _EpochShards:
        shards = permuted(derive(self.seed, epoch, "shards"), len(self.shard_sizes), 0, len(self.shard_sizes))
        starts = _cumulative(self.shard_sizes[shards])
        return _EpochShards(shards, starts, np.append(starts[: len(shards) : self.window], starts[-1]))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        layout: _EpochShards = self._layout(epoch)
        first = int(layout.windows.searchsorted(start, side="right")) - 1
        last = int(layout.windows.searchsorted(stop, side="left"))
        places: Indices = np.concatenate(
            [self._mix(layout, epoch, number, start, stop) for number in range(first, last)]
        )
        at = layout.starts.searchsorted(places, side="right") - 1
        return places + (self._firsts[layout.shards] - layout.starts[:-1])[at]

    def _mix(self, layout: _EpochShards, epoch: int, number: int, start: int, stop: int) -> Indices:
        low, high = int(layout.windows[number]), int(layout.windows[number + 1])
        key = derive(self.seed, epoch, "window", number)
        return permuted(key, high - low, max(start, low) - low, min(stop, high) - low) + low

    def mixing(self, batch_size: int = 256, epoch: int = 0, *, drop_last: bool = False) -> Mixing:
        """Predict how well the batches of `epoch` are mixed.

        O(shards); no sample is listed.
        """
        cut = self._cut(batch_size, epoch, drop_last)
        same = float((cut.rows * (cut.rows - 1.0) * cut.counts).sum(axis=0) @ cut.same_shard)
        sizes = self.shard_sizes
        return Mixing(
            same_shard_pairs=same / max(cut.pairs, 1.0),
            same_shard_pairs_ideal=float((sizes * (sizes - 1.0)).sum()) / max(len(self) * (len(self) - 1.0), 1.0),
            shards_per_batch=float(cut.uses().sum()) / max(cut.batches, 1),
        )

    def nbytes_per_sample(
        self,
        shard_nbytes: Sequence[int],
        batch_size: int = 256,
        epoch: int = 0,
        *,
        kept_shards: float | None = None,
        drop_last: bool = False,
    ) -> float:
        """Predict the bytes read per sample where shards are read whole.

        This holds for Parquet's row groups, and for chunks and shards that are compressed as one. `shard_nbytes` are
        the stored bytes of each shard, in the order of `shard_sizes`.

        A shard is read for the first batch that has samples of it. For each later batch it is still in memory with
        probability `kept_shards / window`; by default all shards of a window are kept. The result is for one process,
        whose threads share what is kept; worker processes each read for themselves.
        """
        nbytes = _arguments.integers("shard_nbytes", shard_nbytes, 0)
        if len(nbytes) != len(self.shard_sizes):
            raise ArgumentError(f"shard_nbytes has {len(nbytes)} values for {len(self.shard_sizes)} shards")
        cut = self._cut(batch_size, epoch, drop_last)
        uses, first = cut.uses(), cut.used()
        present = np.maximum(cut.shards_of_window, 1)
        lost = 1.0 - np.clip((present if kept_shards is None else kept_shards) / present, 0.0, 1.0)
        reads = first + (uses - first) * lost
        return float(reads @ nbytes[self._layout(epoch).shards]) / max(cut.samples, 1)

    def _cut(self, batch_size: int, epoch: int, drop_last: bool) -> _Cut:
        size = _arguments.integer("batch_size", batch_size, 1)
        layout: _EpochShards = self._layout(epoch)
        samples = len(self) // size * size if drop_last else len(self)
        return _Cut(self.shard_sizes[layout.shards], layout.windows, self.window, size, samples)


class _Cut:
    """Overlaps of batches and windows.

    All batches of a window but the first and the last lie inside it. The rows that a batch takes from a window are a
    random subset of it, and no two windows share a shard.
    """

    def __init__(self, sizes: Indices, bounds: Indices, window: int, batch_size: int, samples: int) -> None:
        self._sizes, self._totals = sizes, np.diff(bounds)
        self._window = np.arange(len(sizes)) // window
        self.samples = samples
        self.batches = -(-samples // batch_size)
        whole, rest = divmod(samples, batch_size)
        self.pairs = whole * batch_size * (batch_size - 1.0) + rest * (rest - 1.0)
        """Ordered pairs of samples that share a batch."""
        starts, stops = np.minimum(bounds[:-1], samples), np.minimum(bounds[1:], samples)
        first, last = starts // batch_size, np.maximum(stops - 1, 0) // batch_size
        several, not_empty = last > first, stops > starts
        head = np.where(several, (first + 1) * batch_size, stops) - starts
        self.rows = np.stack([head, np.full(len(starts), batch_size), np.where(several, stops - last * batch_size, 0)])
        """Rows that batches take from each window: the first batch, those inside, the last."""
        self.counts = np.stack([not_empty, np.where(several, last - first - 1, 0), several]).astype(np.float64)
        """Number of batches of each of these three kinds."""

    @property
    def same_shard(self) -> NDArray[np.float64]:
        """Probability that two samples of a window come from one shard."""
        totals = self._totals.astype(np.float64)
        return self._by_window(self._sizes * (self._sizes - 1.0)) / np.maximum(totals * (totals - 1), 1)

    @property
    def shards_of_window(self) -> NDArray[np.float64]:
        """Number of non-empty shards in the window of each shard."""
        return self._by_window(self._sizes > 0)[self._window]

    def uses(self) -> NDArray[np.float64]:
        """Expected number of batches that have samples of each shard."""
        each = zip(self.rows, self.counts, strict=True)
        return np.asarray(sum((1.0 - self._absence(rows)) * counts[self._window] for rows, counts in each))

    def used(self) -> NDArray[np.float64]:
        """Probability that any batch has samples of each shard.

        Less than 1 only where the last batch is dropped.
        """
        return 1.0 - self._absence((self.rows * self.counts).sum(axis=0).astype(np.int64))

    def _by_window(self, values: NDArray[Any]) -> NDArray[np.float64]:
        return np.bincount(self._window, values, len(self._totals)).astype(np.float64)

    def _absence(self, rows: Indices) -> NDArray[np.float64]:
        """Probability that `rows` samples of its window miss each shard."""
        totals = self._totals[self._window]
        others, drawn = totals - self._sizes, np.minimum(rows[self._window], totals)
        log = _log_choose(np.maximum(others, drawn), drawn) - _log_choose(totals, drawn)
        return np.where(others < drawn, 0.0, np.exp(np.minimum(log, 0.0)))


def _cumulative(sizes: Indices) -> Indices:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _log_choose(n: Indices, k: Indices) -> NDArray[np.float64]:
    return _log_factorial(n) - _log_factorial(k) - _log_factorial(n - k)


def _log_factorial(n: Indices) -> NDArray[np.float64]:
    return torch.lgamma(torch.from_numpy(n + 1.0)).numpy()
