"""One loader's order: its sampler, schedule and fingerprint, and how they turn into a state and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from feedline.core.cursor import Cursor, PartitionCursor
from feedline.core.dataset import listing_fingerprint_of
from feedline.core.rng import derive
from feedline.core.schedule import LOOKAHEAD, BatchSchedule, PartitionSchedule, Schedule, Share
from feedline.errors import ArgumentError, StateError
from feedline.loader import state as states
from feedline.loader.error_policy import Quarantine
from feedline.loader.partitions import PartitionedDataset
from feedline.loader.state import Fingerprint
from feedline.samplers import BatchIndexSampler, IndexSampler, MaterializedSampler, TorchDistributed, as_index_sampler
from feedline.workers.registry import POOLS


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule with what it was made from. `sampler` is None for iterable datasets."""

    schedule: Schedule | BatchSchedule | PartitionSchedule
    sampler: Any
    fingerprint: Fingerprint
    lists_at_once: bool = False
    """Whether torch would call `iter(sampler)` with `iter(loader)` and not with the first batch."""

    def begin(self, epoch: int, state: Mapping[str, Any] | None) -> None:
        """Start listing a foreign sampler, from `state` if given."""
        if isinstance(self.sampler, MaterializedSampler):
            if state is not None and "order" in state:
                self.sampler.restore(state["order"])
            self.sampler.begin(epoch, now=self.lists_at_once)
        elif isinstance(self.sampler, _WITH_EPOCHS):
            self.sampler.begin(epoch)

    def base_seed(self, epoch: int, generator: torch.Generator | None) -> int:
        """What new workers seed their generators from; without a seed it is drawn as torch draws it."""
        if self.schedule.seed is not None:
            return derive(self.schedule.seed, epoch, "workers") >> 1
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())

    def requests(self, cursor: Any, delivered: Callable[[], Any]) -> Iterator[Any]:
        """The requests that remain of the cursor's epoch; `delivered()` is the cursor as it moves."""
        if isinstance(self.schedule, PartitionSchedule):
            return self.schedule.requests(cursor, delivered)
        return self.schedule.requests(cursor)

    @property
    def foresees(self) -> bool:
        """Whether requests may be drawn long before they are due: a foreign sampler may decide from batch to batch."""
        if isinstance(self.sampler, MaterializedSampler):
            sampler = self.sampler.sampler
            # All of it is drawn at once, and nobody else draws from its generator.
            return type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
        return self.sampler is not None

    def length(self) -> int:
        """Batches per epoch and rank of a map-style dataset; TypeError for an iterable one."""
        if isinstance(self.schedule, PartitionSchedule):
            raise TypeError("the number of batches of an iterable dataset is not known before it has ended")
        return self.schedule.length(len(self.sampler))

    def fresh(self, epoch: int) -> Cursor | PartitionCursor:
        """The cursor at the start of `epoch`."""
        return PartitionCursor(epoch) if isinstance(self.schedule, PartitionSchedule) else Cursor(epoch)

    def upcoming(self, following: int) -> int:
        """The epoch to iterate: `following`, unless the user has set one on the sampler."""
        return self.sampler.upcoming(following) if isinstance(self.sampler, _WITH_EPOCHS) else following

    def check_order(self, state: Mapping[str, Any]) -> None:
        """Raise `StateError` where a foreign sampler cannot repeat the listing that the state was taken in."""
        if not isinstance(self.sampler, MaterializedSampler):
            return
        if "order" in state:
            self.sampler.restore(state["order"])
            return
        sampler = self.sampler.sampler
        if state.get("position") and type(sampler) is RandomSampler and sampler.generator is None:
            raise StateError("the field 'order' is missing from this state: without it the shuffled order is lost")

    def pack(self, cursor: Any, quarantine: Quarantine, *, over: bool = True) -> dict[str, Any]:
        """The state; `over` says that no epoch is under way, so that there is no listing to repeat."""
        order = None if over or not isinstance(self.sampler, MaterializedSampler) else self.sampler.recorded()
        state = states.pack(cursor, self.fingerprint, quarantine, order)
        if isinstance(self.schedule, PartitionSchedule) and not over:
            state["num_partitions"] = self.schedule.partitions
        return state

    def unpack(self, state: Mapping[str, Any]) -> Cursor | PartitionCursor:
        """The cursor of a state that belongs to this loader; raises `StateError` for any other."""
        self.fingerprint.check(states.fingerprint_of(state))
        cursor = states.unpack_cursor(state, self.fingerprint.kind)
        if isinstance(self.sampler, _WITH_EPOCHS):
            states.check_position(cursor, self.sampler)
        return cursor


_WITH_EPOCHS = (IndexSampler, BatchIndexSampler)


def warn_of_uneven_ranks(dataset: Any, world_size: int) -> None:
    """Say that the ranks of a stream will have unequal numbers of batches, where its partitions tell that."""
    partitions = dataset.num_partitions if isinstance(dataset, PartitionedDataset) else 0
    if partitions > world_size and partitions % world_size:
        warnings.warn(
            f"{type(dataset).__name__} has {partitions} partitions, which {world_size} ranks cannot share equally: some"
            " have more batches than others, and wait forever for these where each step is taken together, as in"
            " DistributedDataParallel. Make it of shards whose number is a multiple of the ranks, loop within"
            " torch.distributed.algorithms.Join([model]), or stop all ranks with the first that ends, as in"
            " docs/how-to/distributed.md",
            stacklevel=3,
        )


def partitions_of(state: Mapping[str, Any] | None) -> int | None:
    """How many partitions the saved run had: a resumed run keeps them, whatever its workers."""
    if state is None or not state.get("partitions"):
        return None
    partitions = state.get("num_partitions")
    if not isinstance(partitions, int) or partitions < 1:
        raise StateError(f"the field 'num_partitions' of this state should be a number >= 1, got {partitions!r}")
    return partitions


def plan_of(loader: Any, rank: int, world_size: int, former: Plan | None = None, partitions: int | None = None) -> Plan:
    """The plan that a loader's arguments mean now.

    `former` is the plan of an earlier epoch, whose DistributedSampler continues; `partitions` overrides the number
    of partitions of an iterable dataset.
    """
    if isinstance(loader.dataset, IterableDataset):
        return _partition_plan(loader, rank, world_size, partitions)
    inner = loader.batch_sampler
    if inner is not None and type(inner) is not BatchSampler:
        return _batch_plan(loader, rank, world_size)
    source = _recognized(loader.sampler if inner is None else inner.sampler, former)
    lookahead = 0 if isinstance(source, MaterializedSampler) else LOOKAHEAD
    if inner is None:
        share = _share(source, rank, world_size, pad=True)
        schedule = Schedule(source, batched=False, share=share, seed=loader.seed, lookahead=lookahead)
    else:
        share = _share(source, rank, world_size, pad=not inner.drop_last)
        schedule = Schedule(source, inner.batch_size, True, inner.drop_last, share, loader.seed, lookahead)
    return Plan(schedule, source, _fingerprint(loader, "samples", source), lists_at_once=inner is None)


def _recognized(sampler: Any, former: Plan | None) -> Any:
    if former is not None and isinstance(former.sampler, TorchDistributed) and former.sampler.sampler is sampler:
        return former.sampler
    return as_index_sampler(sampler)


def _share(source: Any, rank: int, world_size: int, *, pad: bool) -> Share:
    if not isinstance(source, TorchDistributed):
        return Share(rank, world_size, pad=pad)
    if world_size > 1:
        raise ArgumentError(
            "the sampler is a DistributedSampler and distributed= was given as well: both would split the data. "
            "Leave one of them out."
        )
    return Share(source.rank, source.num_replicas, strided=True, pad=not source.drop_last)


def _batch_plan(loader: Any, rank: int, world_size: int) -> Plan:
    source: Any = as_index_sampler(loader.batch_sampler, batches=True)
    drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
    forgets = isinstance(source, MaterializedSampler) and world_size == 1
    schedule = BatchSchedule(source, Share(rank, world_size), loader.seed, drop_last, forgets)
    return Plan(schedule, source, _fingerprint(loader, "batches", source), lists_at_once=True)


def _partition_plan(loader: Any, rank: int, world_size: int, partitions: int | None) -> Plan:
    dataset = loader.dataset
    if isinstance(dataset, PartitionedDataset):
        partitions = dataset.num_partitions
        if partitions < world_size:
            raise ArgumentError(
                f"{type(dataset).__name__} has {partitions} partitions, fewer than the {world_size} ranks"
            )
        mine = tuple(range(rank, partitions, world_size))
    elif world_size > 1:
        raise ArgumentError(
            f"{type(dataset).__name__} is an IterableDataset without partitions: every rank would read all of it. "
            "Give it num_partitions and partition(number, epoch) (feedline.PartitionedDataset), or shard it in "
            "__iter__ and leave out distributed="
        )
    else:
        kind = POOLS.get(loader.worker_method)  # None for "auto", which gives such a stream processes
        is_hosted = kind is None or kind.hosts_partitions
        partitions = partitions or (max(1, loader.num_workers) if is_hosted else 1)
        mine = tuple(range(partitions))
    name = type(dataset).__name__
    return Plan(
        PartitionSchedule(partitions, mine, loader.seed, loader.in_order),
        None,
        Fingerprint("iterable", None, name, loader.seed),
    )


def _fingerprint(loader: Any, kind: str, source: Any) -> Fingerprint:
    try:
        length = len(loader.dataset)
    except (TypeError, NotImplementedError):
        length = None
    return Fingerprint(kind, length, source.fingerprint(), loader.seed, listing_fingerprint_of(loader.dataset))
