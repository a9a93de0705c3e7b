"""Shuffling that reads few shards at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.caches import RecentResults
from feedline.core.rng import derive, permuted
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers.base import IndexSampler, Indices

MEASURED_BATCHES = 256
"""Number of batches that `mixing` lists if shards are divided among partitions."""


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


class _PartitionRows(NamedTuple):
    """Rows of one global batch by partition.

    Partition k has the rows [starts[k], starts[k + 1]).
    """

    starts: Indices

    @classmethod
    def of(cls, rows: int, partitions: int) -> _PartitionRows:
        """Divide rows as equally as possible.

        A partition has none if there are fewer rows than partitions.
        """
        return cls(np.arange(partitions + 1, dtype=np.int64) * rows // partitions)

    @property
    def counts(self) -> Indices:
        """Number of rows of each partition."""
        return np.diff(self.starts)


class _EpochShards(NamedTuple):
    """The shards of one epoch, in reading order."""

    shards: Indices
    starts: Indices  # start of each shard in `shards` before mixing, and the end of the epoch
    partitions: Indices  # start of each partition, and the end of the epoch
    windows: Indices  # start of each window, and the end of the epoch; every partition starts a window


class ShardShuffled(IndexSampler):
    """Every index once, shuffled within a moving window of shards.

    Indices count through the shards: the first `shard_sizes[0]` of them are in shard 0, and so on. Each epoch permutes
    the shards by `seed`, groups `window` of them at a time, and permutes the samples of each group. So at most `window`
    shards are read at any moment (two groups in a batch that crosses from one to the next). Memory is proportional to
    the number of shards, not of samples.

    With `partitions`, the shards of an epoch are divided among that many partitions, each with windows of its own, and
    every global batch of `global_batch_size` samples has the same rows of each partition. Since a rank gets a run of
    the rows, it reads only about its share of the shards. The order depends on `partitions` and `global_batch_size`,
    not on the ranks: it stays the same for another world size. Use at least as many partitions as there will ever be
    ranks; with a multiple of the ranks, no partition is read by two of them.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        seed: int = 0,
        window: int = 16,
        *,
        partitions: int = 1,
        global_batch_size: int | None = None,
    ) -> None:
        self.shard_sizes = _arguments.integers("shard_sizes", shard_sizes, 0)
        self.seed = _arguments.seed(seed)
        self.window = _arguments.integer("window", window, 1, "1 reads shard after shard, more mixes better")
        self.partitions = _arguments.integer("partitions", partitions, 1, "1 shares every shard among all ranks")
        self.global_batch_size = _global_batch(global_batch_size, self.partitions)
        self._firsts = _cumulative(self.shard_sizes)
        self.length = self.extent = int(self._firsts[-1])
        if not self.length:
            raise ArgumentError("shard_sizes are all zero: at least one shard needs a sample")
        self._stripe = self.global_batch_size or self.length
        self._stripes, rest = divmod(self.length, self._stripe)
        self._rows, self._last_rows = (
            _PartitionRows.of(self._stripe, self.partitions),
            _PartitionRows.of(rest, self.partitions),
        )
        self._layout = RecentResults(self._lay_out)

    def _lay_out(self, epoch: int) -> _EpochShards:
        shards = permuted(derive(self.seed, epoch, "shards"), len(self.shard_sizes), 0, len(self.shard_sizes))
        starts = _cumulative(self.shard_sizes[shards])
        partitions = _cumulative(self._stripes * self._rows.counts + self._last_rows.counts)
        # A partition may end within a shard, so that all partitions have their exact number of samples. Its windows
        # count from the shard in which it starts.
        first = starts[:-1].searchsorted(partitions[:-1], side="right") - 1
        last = starts[:-1].searchsorted(partitions[1:], side="left")
        first[0], last[-1] = 0, len(shards)  # empty shards at either end belong to a window, too
        windows = [starts[low : max(high, low + 1) : self.window] for low, high in zip(first, last, strict=True)]
        bounds = np.maximum(np.concatenate(windows), np.repeat(partitions[:-1], [len(part) for part in windows]))
        return _EpochShards(shards, starts, partitions, np.append(bounds, starts[-1]))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        layout: _EpochShards = self._layout(epoch)
        places = np.empty(stop - start, np.int64)
        for where, low, high in self._runs(layout, start, stop):
            places[where] = self._mix_windows(layout, epoch, low, high)
        at = layout.starts.searchsorted(places, side="right") - 1
        return places + (self._firsts[layout.shards] - layout.starts[:-1])[at]

    def _runs(self, layout: _EpochShards, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Runs [low, high) of each partition within [start, stop).

        Each has the places of its samples among these positions.

        Each batch takes the next samples of a partition, so any span of positions takes one run of each partition.
        """
        if self.partitions == 1:
            yield slice(None), start, stop
            return
        stripe, row = np.divmod(np.arange(start, stop), self._stripe)
        is_last = stripe >= self._stripes
        partition = np.where(
            is_last,
            self._last_rows.starts.searchsorted(row, side="right") - 1,
            self._rows.starts.searchsorted(row, side="right") - 1,
        )
        inside = row - np.where(is_last, self._last_rows.starts[partition], self._rows.starts[partition])
        offset = layout.partitions[partition] + stripe * self._rows.counts[partition] + inside
        order = np.argsort(partition, kind="stable")
        cuts = np.flatnonzero(np.diff(partition[order])) + 1
        for where in np.split(order, cuts):
            yield where, int(offset[where[0]]), int(offset[where[-1]]) + 1

    def _mix_windows(self, layout: _EpochShards, epoch: int, start: int, stop: int) -> Indices:
        """Places of a run of one partition after mixing."""
        first = int(layout.windows.searchsorted(start, side="right")) - 1
        last = int(layout.windows.searchsorted(stop, side="left"))
        runs = [self._mix(layout, epoch, number, start, stop) for number in range(first, last)]
        return runs[0] if len(runs) == 1 else np.concatenate(runs)

    def _mix(self, layout: _EpochShards, epoch: int, number: int, start: int, stop: int) -> Indices:
        low, high = int(layout.windows[number]), int(layout.windows[number + 1])
        key = derive(self.seed, epoch, "window", number)
        return permuted(key, high - low, max(start, low) - low, min(stop, high) - low) + low

    def shards_of(self, rank: int, world_size: int, epoch: int = 0) -> Indices:
        """Numbers, int64, of the shards from which a rank reads in `epoch`.

        With one partition, these are all shards. With several, the global batches must have `global_batch_size`
        samples; those of an incomplete last one count, too, and so do the samples that complete it. For a node, pass
        its number among equal nodes as `rank`, and their count as `world_size`; the last batch is then divided as if
        the node were one rank.
        """
        world_size = _arguments.integer("world_size", world_size, 1)
        rank = _arguments.integer("rank", rank, 0)
        if rank >= world_size:
            raise ArgumentError(f"rank must be below world_size={world_size}; got {rank}")
        layout: _EpochShards = self._layout(epoch)
        if self.partitions == 1:
            return layout.shards.copy()
        whole, last = self._shards_of_whole_batches(layout, rank, world_size), self._last_batch(epoch, rank, world_size)
        more = np.unique(self._firsts.searchsorted(last, side="right") - 1)
        return np.concatenate([whole, more[~np.isin(more, whole)]])

    def _shards_of_whole_batches(self, layout: _EpochShards, rank: int, world_size: int) -> Indices:
        each = -(-self._stripe // world_size)
        low, high = min(rank * each, self._stripe), min((rank + 1) * each, self._stripe)
        if low >= high or not self._stripes:
            return layout.shards[:0]
        first, last = (int(self._rows.starts.searchsorted(row, side="right")) - 1 for row in (low, high - 1))
        start, stop = layout.partitions[first], layout.partitions[last + 1]
        begin = int(layout.starts.searchsorted(start, side="right")) - 1
        end = int(layout.starts[:-1].searchsorted(stop, side="left"))
        return layout.shards[begin:end]

    def _last_batch(self, epoch: int, rank: int, world_size: int) -> Indices:
        """The indices that a rank reads for an incomplete last batch.

        It is completed with the first indices of the epoch.
        """
        whole = self._stripes * self._stripe
        each = -(-(len(self) - whole) // world_size)
        start, stop = whole + rank * each, whole + (rank + 1) * each
        beyond = range(max(start, len(self)), stop)
        wrapped = [self.take(epoch, place % len(self), place % len(self) + 1) for place in beyond]
        return np.concatenate([self.take(epoch, start, stop), *wrapped])

    def mixing(self, batch_size: int = 256, epoch: int = 0, *, drop_last: bool = False) -> Mixing:
        """Predict how well the batches of `epoch` are mixed.

        O(shards); no sample is listed. With partitions, `batch_size` counts the rows of one rank, and up to
        `MEASURED_BATCHES` batches of the epoch are listed and counted.
        """
        if self.partitions > 1:
            return self._measured_mixing(batch_size, epoch, drop_last)
        cut = self._overlaps(batch_size, epoch, drop_last)
        same = float((cut.rows * (cut.rows - 1.0) * cut.counts).sum(axis=0) @ cut.same_shard)
        sizes = self.shard_sizes
        return Mixing(
            same_shard_pairs=same / max(cut.pairs, 1.0),
            same_shard_pairs_ideal=float((sizes * (sizes - 1.0)).sum()) / max(len(self) * (len(self) - 1.0), 1.0),
            shards_per_batch=float(cut.uses().sum()) / max(cut.batches, 1),
        )

    def _measured_mixing(self, batch_size: int, epoch: int, drop_last: bool) -> Mixing:
        size = _arguments.integer("batch_size", batch_size, 1)
        batches = max(1, len(self) // size if drop_last else -(-len(self) // size))
        same, pairs, shards = 0.0, 0.0, 0
        numbers = np.unique(np.linspace(0, batches - 1, MEASURED_BATCHES).astype(np.int64))
        for number in numbers.tolist():
            rows = self.take(epoch, number * size, (number + 1) * size)
            counts = np.bincount(self._firsts.searchsorted(rows, side="right") - 1).astype(np.float64)
            same += float((counts * (counts - 1)).sum())
            pairs += len(rows) * (len(rows) - 1.0)
            shards += int((counts > 0).sum())
        sizes = self.shard_sizes
        ideal = float((sizes * (sizes - 1.0)).sum()) / max(len(self) * (len(self) - 1.0), 1.0)
        return Mixing(same / max(pairs, 1.0), ideal, shards / len(numbers))

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
        whose threads share the kept shards; each worker process reads its own.
        """
        nbytes = _arguments.integers("shard_nbytes", shard_nbytes, 0)
        if len(nbytes) != len(self.shard_sizes):
            raise ArgumentError(f"shard_nbytes has {len(nbytes)} values for {len(self.shard_sizes)} shards")
        cut = self._overlaps(batch_size, epoch, drop_last)
        uses, first = cut.uses(), cut.use_probability()
        present = np.maximum(cut.shards_of_window, 1)
        lost = 1.0 - np.clip((present if kept_shards is None else kept_shards) / present, 0.0, 1.0)
        reads = first + (uses - first) * lost
        return float(reads @ nbytes[self._layout(epoch).shards]) / max(cut.samples, 1)

    def _overlaps(self, batch_size: int, epoch: int, drop_last: bool) -> _WindowOverlaps:
        size = _arguments.integer("batch_size", batch_size, 1)
        if self.partitions > 1:
            raise ArgumentError("nbytes_per_sample is for one partition; shards_of gives the shards that a rank reads")
        layout: _EpochShards = self._layout(epoch)
        samples = len(self) // size * size if drop_last else len(self)
        return _WindowOverlaps(self.shard_sizes[layout.shards], layout.windows, self.window, size, samples)


class _WindowOverlaps:
    """Overlaps of batches and windows.

    All batches of a window except the first and the last are inside it. The rows that a batch takes from a window are a
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

    def use_probability(self) -> NDArray[np.float64]:
        """Probability that any batch has samples of each shard.

        It is less than 1 only if the last batch is dropped.
        """
        return 1.0 - self._absence((self.rows * self.counts).sum(axis=0).astype(np.int64))

    def _by_window(self, values: NDArray[Any]) -> NDArray[np.float64]:
        return np.bincount(self._window, values, len(self._totals)).astype(np.float64)

    def _absence(self, rows: Indices) -> NDArray[np.float64]:
        """Probability that `rows` samples of its window miss each shard."""
        totals = self._totals[self._window]
        others, drawn = totals - self._sizes, np.minimum(rows[self._window], totals)
        # The ratio of two binomial coefficients; without others enough, it counts as 0.
        most = np.maximum(others, drawn)
        above, below, all_above, all_below = _log_factorial(np.stack([most, most - drawn, totals, totals - drawn]))
        log = above - below - all_above + all_below
        return np.where(others < drawn, 0.0, np.exp(np.minimum(log, 0.0)))


def _global_batch(size: int | None, partitions: int) -> int | None:
    if size is None:
        if partitions > 1:
            raise ArgumentError(
                "partitions= needs global_batch_size=, the samples of a batch of all ranks together "
                "(batch_size * world_size): its rows are divided among the partitions"
            )
        return None
    size = _arguments.integer("global_batch_size", size, 1)
    if size < partitions:
        raise ArgumentError(f"global_batch_size must be at least partitions={partitions}, a row for each; got {size}")
    return size if partitions > 1 else None


def _cumulative(sizes: Indices) -> Indices:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _log_factorial(n: Indices) -> NDArray[np.float64]:
    return torch.lgamma(torch.from_numpy(n + 1.0)).numpy()
