"""One rank's share of an order, for torch's own DataLoader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from feedline.core.caches import RecentResults
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers.base import BatchIndexSampler, IndexSampler, Indices, describe
from feedline.samplers.basic import check_finite

if TYPE_CHECKING:
    from torch.utils.data import DistributedSampler


class _RankPart:
    """The positions of one rank: rank, rank + world_size, ...

    All ranks have the same number of positions. An order whose length is not a multiple of the world size is completed
    from its start, or cut with `drop_last`.
    """

    def __init__(self, length: int, rank: int, world_size: int, drop_last: bool) -> None:
        self.world_size = _arguments.integer("world_size", world_size, 1)
        self.rank = _arguments.integer("rank", rank, 0)
        if self.rank >= self.world_size:
            raise ArgumentError(f"rank must be below world_size={world_size}, but is {rank}")
        self.drop_last = bool(drop_last)
        self.source_length = length
        self.length = length // world_size if drop_last else -(-length // world_size)
        if not self.length:
            raise ArgumentError(f"drop_last=True leaves no sample of {length} for {world_size} ranks: omit it")

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The spans of the global order that contain [start, stop).

        In their concatenation, every `world_size`-th element belongs to this rank, starting with the first.
        """
        first, end = start * self.world_size + self.rank, (stop - 1) * self.world_size + self.rank + 1
        n = self.source_length
        return [(max(first - turn * n, 0), min(end - turn * n, n)) for turn in range(first // n, -(-end // n))]


class Distributed(IndexSampler):
    """One rank's share of the order of `sampler`, for torch's own DataLoader.

    Ranks take turns, as in torch's `DistributedSampler`. Shares are equal: the order is continued from its beginning,
    or with `drop_last` cut at its end. Not needed with `feedline.DataLoader(distributed=...)`, which
    slices the order itself and allows the number of ranks to change. A span costs `world_size` times its own length in
    indices of the global order.
    """

    def __init__(self, sampler: IndexSampler, rank: int, world_size: int, drop_last: bool = False) -> None:
        self.sampler = check_finite("sampler", sampler)
        self._part = part = _RankPart(len(sampler), rank, world_size, drop_last)
        self.rank, self.world_size, self.drop_last = part.rank, part.world_size, part.drop_last
        self.length = self._part.length
        self.extent = sampler.extent

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        parts = [self.sampler.take(epoch, low, high) for low, high in self._part.spans(start, stop)]
        return np.array(np.concatenate(parts)[:: self._part.world_size])


class DistributedBatches(BatchIndexSampler):
    """One rank's share of the batches of a batch sampler.

    The `world_size` ranks take turns by whole batches. All ranks have equally many batches, as in `Distributed`. For
    `batch_sampler=` of torch's own DataLoader.
    """

    def __init__(self, sampler: BatchIndexSampler, rank: int, world_size: int, drop_last: bool = False) -> None:
        if not isinstance(sampler, BatchIndexSampler):
            raise ArgumentError(
                f"sampler must be one of feedline's batch samplers, but is a {type(sampler).__name__}: "
                "Distributed takes samplers of indices"
            )
        self.sampler = sampler
        self._part = part = _RankPart(len(sampler), rank, world_size, drop_last)
        self.rank, self.world_size, self.drop_last = part.rank, part.world_size, part.drop_last
        self.length = self._part.length

    def batches(self, epoch: int, start: int, stop: int) -> list[Indices]:
        part = self._part
        numbers = ((number * part.world_size + part.rank) % part.source_length for number in range(start, stop))
        return [self.sampler.take_batches(epoch, number, number + 1)[0] for number in numbers]


class _BegunEpoch(int):
    """An epoch that a loader began; those of users are `int`."""


class TorchDistributed(IndexSampler):
    """The global order of a `torch.utils.data.DistributedSampler`.

    The order is neither padded nor cut; rank r reads rows r, r + num_replicas, ... of it. The latest epoch is kept:
    O(n) memory, as in torch.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.sampler = sampler
        self.length = self.extent = len(sampler.dataset)  # type: ignore[arg-type]
        self.num_replicas: int = sampler.num_replicas
        self.rank: int = sampler.rank
        self.drop_last: bool = sampler.drop_last
        self._order = RecentResults(self._list, keep=1)

    def upcoming(self, following: int) -> int:
        """See `IndexSampler.upcoming`; the epoch is the epoch of torch's sampler."""
        epoch = self.sampler.epoch
        is_kept = isinstance(epoch, _BegunEpoch) or not isinstance(self._begun, _BegunEpoch)
        return following if is_kept and epoch == self._begun else int(epoch)

    def begin(self, epoch: int) -> None:
        """See `IndexSampler.begin`; updates the epoch of torch's sampler too."""
        super().begin(_BegunEpoch(epoch))
        self.sampler.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.sampler.set_epoch(epoch)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        if not self.sampler.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        return np.array(self._order(self.sampler.seed + epoch)[start:stop])

    def _list(self, seed: int) -> Indices:
        generator = torch.Generator()
        generator.manual_seed(seed)
        order: Indices = torch.randperm(len(self), generator=generator, device="cpu").numpy()
        return order

    def fingerprint(self) -> str:
        return describe(self, n=len(self), shuffle=self.sampler.shuffle, seed=self.sampler.seed)
