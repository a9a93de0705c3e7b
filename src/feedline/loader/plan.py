"""Plan of a loader: sampler, schedule and fingerprint; conversion to states."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, RandomSampler

from feedline.core.cursor import Cursor, PartitionCursor
from feedline.core.dataset import declared
from feedline.core.dataset_fingerprint import decode_share_of, listing_fingerprint_of
from feedline.core.live import is_live
from feedline.core.packing import to_leaf
from feedline.core.rng import derive
from feedline.core.rng_globals import draw_seed
from feedline.core.schedule import LOOKAHEAD, BatchSchedule, PartitionSchedule, Schedule, Share, batch_size_of
from feedline.core.torch_wrappers import is_torchs
from feedline.errors import ArgumentError, StateError
from feedline.loader import state as states
from feedline.loader.error_policy import Quarantine
from feedline.loader.partitions import is_partitioned, partitioned
from feedline.loader.ranks.own_shares import check_shares
from feedline.loader.worker_states import WorkerStates, resume_workers
from feedline.samplers import (
    BatchIndexSampler,
    IndexSampler,
    MaterializedSampler,
    Sequential,
    TorchDistributed,
    as_index_sampler,
)
from feedline.workers.registry import POOLS


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule with its sampler and fingerprint.

    `sampler` is None for iterable datasets.
    """

    schedule: Schedule | BatchSchedule | PartitionSchedule
    sampler: Any
    fingerprint: states.Fingerprint
    lists_at_once: bool = False
    """True if torch calls `iter(sampler)` in `iter(loader)`, not with the first batch."""
    workers: WorkerStates = field(default_factory=partial(WorkerStates, 0), compare=False)
    """The states of the workers, recorded as their batches are delivered."""
    owns_sampler: bool = False
    """True if only this plan has the sampler: the user sets no epoch on it."""

    def begin(self, epoch: int, state: Mapping[str, Any] | None, *, with_workers: bool = False) -> None:
        """Start an epoch of the sampler, from `state` if given.

        `with_workers` is true if worker processes start before the first item is drawn.
        """
        if isinstance(self.sampler, MaterializedSampler):
            if (order := states.part_of(state, "order")) is not None:
                self.sampler.restore(order)
            self.sampler.begin(epoch, now=self.lists_at_once, twice=with_workers)
        elif isinstance(self.sampler, _WITH_EPOCHS):
            self.sampler.begin(epoch)

    def mark_epoch_read(self, epoch: int) -> None:
        """Record that the epoch set on the sampler is read already."""
        if isinstance(self.sampler, _WITH_EPOCHS):
            self.sampler.begin(epoch)

    def draw_first(self) -> None:
        """Draw the first item of the order, unless that is done.

        Something may draw from the same generator before the first batch: the order would then be another one.
        """
        if isinstance(self.sampler, MaterializedSampler):
            self.sampler.draw_first()

    def end(self) -> None:
        """End the epoch of the sampler."""
        if isinstance(self.sampler, MaterializedSampler):
            self.sampler.end()

    def base_seed(self, epoch: int, generator: torch.Generator | None) -> int:
        """The base seed of new workers.

        With `seed`, it is derived from seed and epoch. Otherwise it is that of the resumed run, or is drawn from
        `generator` as in torch.
        """
        if self.schedule.seed is not None:
            self.workers.base_seed = derive(self.schedule.seed, epoch, "workers") >> 1
        elif self.workers.base_seed is None:
            self.workers.base_seed = draw_seed(generator)
        return self.workers.base_seed

    def requests(self, cursor: Any, delivered: Callable[[], Any], run: int) -> Iterator[Any]:
        """The requests of iteration `run` after `cursor`; `delivered()` returns the current cursor."""
        if isinstance(self.schedule, PartitionSchedule):
            return self.workers.with_initial_states(self.schedule.requests(cursor, delivered, run))
        return self.workers.with_initial_states(self.schedule.requests(cursor))

    def with_workers_of(self, state: Mapping[str, Any] | None, count: int, rank: int) -> Plan:
        """The same plan with the workers of a saved state, on `rank`."""
        if state is None:
            return replace(self, workers=WorkerStates(count)) if self.workers.count != count else self
        partitions = self.schedule.own_partitions if isinstance(self.schedule, PartitionSchedule) else None
        cursor = self.unpack(state)
        place = 0 if not isinstance(cursor, Cursor) else cursor.position
        begun = cursor.is_begun if isinstance(cursor, PartitionCursor) else cursor != self.start_of(cursor.epoch)
        saved = states.part_of(state, "workers")
        is_strided = isinstance(self.schedule, PartitionSchedule) and self.schedule.stride[1] > 1
        workers = resume_workers(saved, count, place, partitions, begun=begun, rank=rank, is_strided=is_strided)
        return replace(self, workers=workers)

    @property
    def allows_lookahead(self) -> bool:
        """True if requests may be drawn long before they are due.

        Most foreign samplers forbid it, because they may decide from batch to batch.
        """
        if isinstance(self.sampler, MaterializedSampler):
            sampler = self.sampler.sampler
            # It draws the whole order at once, from a generator of its own.
            return is_torchs(sampler, RandomSampler) and not sampler.replacement and sampler.generator is None
        return self.sampler is not None

    def length(self) -> int:
        """Batches per epoch and rank; TypeError if their number is unknown."""
        if isinstance(self.schedule, PartitionSchedule):
            raise TypeError("the number of batches of an iterable dataset is unknown before its end")
        return self.schedule.length(len(self.sampler))

    def remaining(self, cursor: Cursor | PartitionCursor) -> int:
        """Batches that this rank has left in the epoch.

        TypeError if their number is unknown. They are counted from the cursor: a state of another batch size or world
        size may end within a batch of this one.
        """
        schedule = self.schedule
        if isinstance(schedule, PartitionSchedule) or isinstance(cursor, PartitionCursor):
            return self.length()
        each = self._positions_per_step
        gaps = cursor.gaps(cursor.delivered_ahead[-1][1]) if cursor.delivered_ahead else []
        filled = cursor.delivered_ahead[-1][1] if cursor.delivered_ahead else cursor.position
        rest = max(0, len(self.sampler) - filled)
        return sum(-(-(stop - start) // each) for start, stop in gaps) + schedule.length(rest)

    @property
    def _positions_per_step(self) -> int:
        schedule = self.schedule
        return schedule.global_batch_size if isinstance(schedule, Schedule) else schedule.share.world_size  # type: ignore[union-attr]

    def start_of(self, epoch: int) -> Cursor | PartitionCursor:
        """The cursor at the start of an epoch."""
        if isinstance(self.schedule, PartitionSchedule):
            return PartitionCursor(epoch, continues=self.schedule.continues)
        return Cursor(epoch)

    @property
    def takes_epochs(self) -> bool:
        """True if the user may set an epoch on the sampler."""
        return isinstance(self.sampler, _WITH_EPOCHS) and not self.owns_sampler

    def upcoming(self, following: int) -> int:
        """The epoch set on the sampler by the user, else `following`."""
        return self.sampler.upcoming(following) if isinstance(self.sampler, _WITH_EPOCHS) else following

    def as_own_state(self, state: Mapping[str, Any], *, goes_on: bool) -> dict[str, Any]:
        """A loaded state as one of this rank.

        With `goes_on`, the state of a complete epoch becomes the start of the next one.
        """
        adopted = self._after_complete(state) if goes_on else dict(state)
        if isinstance(self.schedule, PartitionSchedule):
            adopted["rank"], adopted["world_size"] = self.schedule.owner
        return adopted

    def _after_complete(self, state: Mapping[str, Any]) -> dict[str, Any]:
        cursor = self.unpack(state)
        if not self._is_complete(cursor):
            return dict(state)
        order = states.part_of(state, "order")
        ended = None if order is None or "seed" in order else to_leaf({**order, "ended": True})
        following = {"epoch": cursor.epoch + 1, "random": state.get("random")}
        if isinstance(cursor, PartitionCursor) and cursor.continues:
            return {
                **state,
                **following,
                "step": 0,
                "partitions": [[*entry[:4], False] for entry in state["partitions"]],
            }
        if isinstance(cursor, PartitionCursor):
            return {**state, **following, "step": 0, "partitions": [], "next_partition": 0, "num_partitions": None}
        return {**state, **following, "position": 0, "delivered_ahead": [], "order": ended}

    def _is_complete(self, cursor: Cursor | PartitionCursor) -> bool:
        if isinstance(self.schedule, PartitionSchedule):
            return isinstance(cursor, PartitionCursor) and cursor.ended().issuperset(self.schedule.own_partitions)
        try:
            return not self.remaining(cursor)
        except TypeError:  # a sampler without a length
            return False

    def delivered(self, cursor: Cursor | PartitionCursor) -> int:
        """Batches of the epoch that this rank has received."""
        if isinstance(cursor, PartitionCursor):
            return cursor.step
        received = cursor.position + sum(stop - start for start, stop in cursor.delivered_ahead)
        return -(-received // self._positions_per_step)

    def check_order(self, state: Mapping[str, Any]) -> None:
        """Raise `StateError` if a foreign sampler cannot repeat its saved order."""
        if not isinstance(self.sampler, MaterializedSampler):
            return
        order = states.part_of(state, "order")
        if order is not None:
            self.sampler.restore(order)
            return
        sampler = self.sampler.sampler
        if state.get("position") and is_torchs(sampler, RandomSampler) and sampler.generator is None:
            raise StateError(
                "the field 'order' is missing from this state: without it the shuffled order cannot be repeated"
            )

    def pack(
        self, cursor: Any, quarantine: Quarantine, *, over: bool = True,
        workers: dict[str, Any] | None = None, random: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The state at `cursor`.

        With `over`, the epoch has ended: the state holds the start of the next one. `workers` holds the packed states
        of the workers, `random` the process's generators.
        """
        parts = states.Parts(self._pack_order(cursor, over=over), workers, random)
        if isinstance(self.schedule, PartitionSchedule):
            is_begun = not over or self.schedule.continues or bool(cursor.marks)
            parts = replace(
                parts, owner=self.schedule.owner, num_partitions=self.schedule.partitions if is_begun else None
            )
        return states.pack(cursor, self.fingerprint, quarantine, parts)

    def _pack_order(self, cursor: Any, *, over: bool) -> dict[str, Any] | None:
        if not isinstance(self.sampler, MaterializedSampler):
            return None
        if over:
            return self.sampler.record_end()
        return self.sampler.record(cursor.position)

    def unpack(self, state: Mapping[str, Any]) -> Cursor | PartitionCursor:
        """The cursor of a state; `StateError` if it belongs to another loader."""
        self.fingerprint.check(states.fingerprint_of(state))
        cursor = states.unpack_cursor(state, self.fingerprint.kind)
        if isinstance(self.sampler, _WITH_EPOCHS):
            states.check_position(cursor, self.sampler)
        if isinstance(cursor, PartitionCursor) and isinstance(self.schedule, PartitionSchedule):
            states.check_owner(state, self.schedule.owner)
            return replace(cursor, continues=self.schedule.continues)
        return cursor


_WITH_EPOCHS = (IndexSampler, BatchIndexSampler)


def _check_strides(dataset: Any) -> None:
    if isinstance(dataset, IterDataPipe):
        raise ArgumentError(
            f"{type(dataset).__name__} is a data pipe, which torch shares among the ranks by its sharding_filter: "
            "leave out distributed="
        )


def _warn_of_striding(dataset: Any, world_size: int) -> None:
    name = type(dataset).__name__
    warnings.warn(
        f"{name} has no partitions: each of {world_size} ranks reads all of it and keeps one sample of {world_size}, so"
        f" reading costs {world_size} times as much. Give it partitions (fl.PartitionedDataset, fl.streams), or leave"
        " out distributed= if __iter__ already shares the samples among the ranks",
        stacklevel=4,
    )


def check_ranks(dataset: Any, rank: int, world_size: int, *, allows_uneven: bool, reads_all: bool) -> None:
    """Raise `ArgumentError` for a stream that may be divided twice.

    Warns of a stream that each rank must read as a whole. With `allows_uneven`, also warns of ranks with unequal
    numbers of partitions, which may wait for each other forever. See `RankPolicy` for `reads_all`.
    """
    if world_size > 1 and isinstance(dataset, IterableDataset):
        if not reads_all:
            check_shares(dataset, rank, world_size)
        dataset = partitioned(dataset, world_size)
        if not is_partitioned(dataset):
            _warn_of_striding(dataset, world_size)
    partitions = dataset.num_partitions if is_partitioned(dataset) else 0
    if allows_uneven and partitions > world_size and partitions % world_size:
        warnings.warn(
            f"{type(dataset).__name__} has {partitions} partitions, which {world_size} ranks cannot share equally: some"
            " get more batches than others, and wait forever where all ranks step together, as in"
            " DistributedDataParallel. Use a number of shards that is a multiple of the ranks, loop within"
            " torch.distributed.algorithms.Join([model]), or stop all ranks with the first that ends:"
            " distributed=fl.RankPolicy(uneven='stop')",
            stacklevel=3,
        )


def partitions_of(state: Mapping[str, Any] | None) -> int | None:
    """The number of partitions of a saved run, or None.

    A resumed run keeps that number, for any number of workers. `StateError` if the number is damaged.
    """
    if state is None or not state.get("partitions"):
        return None
    partitions = state.get("num_partitions")
    if not isinstance(partitions, int) or partitions < 1:
        raise StateError(f"the field 'num_partitions' of this state should be a number >= 1, got {partitions!r}")
    return partitions


def plan_of(loader: Any, rank: int, world_size: int, former: Plan | None = None, partitions: int | None = None) -> Plan:
    """The plan for the current arguments of a loader.

    `former` is the plan of an earlier epoch; its DistributedSampler is reused. `partitions` is the number for an
    iterable dataset without partitions of its own, by default one for each worker.
    """
    if isinstance(loader.dataset, IterableDataset):
        return _partition_plan(loader, rank, world_size, partitions)
    order = loader._index_sampler  # not its attributes: torch's hook for subclasses
    inner = order if loader._auto_collation else None
    if inner is not None and not is_torchs(inner, BatchSampler):
        return _batch_plan(loader, inner, rank, world_size)
    given = order if inner is None else inner.sampler
    source = _adapt_sampler(given, former)
    share = _share(source, rank, world_size, pad=inner is None or not inner.drop_last)
    lookahead = 0 if isinstance(source, MaterializedSampler) else LOOKAHEAD
    batches = (1, False, False) if inner is None else (batch_size_of(inner), True, inner.drop_last)
    # With drop_last, torch reads the size once for each epoch.
    resizable = None if inner is None or inner.drop_last else inner
    forgets = _forgets(loader, source, share)
    schedule = Schedule(source, *batches, share, loader._fl.seed, lookahead, forgets, resizable)
    fingerprint = _fingerprint(loader, "samples", source)
    is_own = type(source) is Sequential and source is not given
    return Plan(schedule, source, fingerprint, inner is None, WorkerStates(loader.num_workers), is_own)


def _forgets(loader: Any, source: Any, share: Share) -> bool:
    """True if no item of a foreign sampler is read again.

    Ranks complete their last batch with the first items of the epoch, or repeat all of them.
    """
    is_repeated = share.world_size > 1 or loader._fl_ranks.uneven == "repeat"
    return isinstance(source, MaterializedSampler) and not is_repeated


def _adapt_sampler(sampler: Any, former: Plan | None) -> Any:
    adapted = as_index_sampler(sampler)
    known: Any = None if former is None else former.sampler
    is_known = isinstance(adapted, TorchDistributed) and isinstance(known, TorchDistributed)
    return known if is_known and known.sampler is sampler else adapted


def _share(source: Any, rank: int, world_size: int, *, pad: bool) -> Share:
    if not isinstance(source, TorchDistributed):
        return Share(rank, world_size, pad=pad)
    if world_size > 1:
        raise ArgumentError(
            "the sampler is a DistributedSampler, and distributed= is set: both would split the data. "
            "Remove one of them. Lightning adds such a sampler unless it is Trainer(use_distributed_sampler=False)."
        )
    return Share(source.rank, source.num_replicas, strided=True, pad=not source.drop_last)


def _batch_plan(loader: Any, sampler: Any, rank: int, world_size: int) -> Plan:
    source: Any = as_index_sampler(sampler, batches=True)
    drop_last = bool(declared(sampler, "drop_last"))
    share = Share(rank, world_size)
    schedule = BatchSchedule(source, share, loader._fl.seed, drop_last, _forgets(loader, source, share))
    return Plan(schedule, source, _fingerprint(loader, "batches", source), lists_at_once=True)


def _partition_plan(loader: Any, rank: int, world_size: int, partitions: int | None) -> Plan:
    dataset, stride = partitioned(loader.dataset, world_size), (0, 1)
    owner: tuple[int | None, int] = rank, world_size
    if is_partitioned(dataset):
        partitions = dataset.num_partitions
        if partitions < world_size:
            raise ArgumentError(
                f"{type(dataset).__name__} has {partitions} partitions, fewer than the {world_size} ranks: rank "
                f"{partitions} would have no data. Use at least as many partitions (files, shards) as ranks, or fewer "
                "ranks"
            )
        mine = tuple(range(rank, partitions, world_size))
    else:
        kind = POOLS.get(loader._fl.worker_method)  # None for "auto", which gives such a stream processes
        is_hosted = kind is None or kind.hosts_partitions
        partitions = partitions or (max(1, loader.num_workers) if is_hosted else 1)
        mine = tuple(range(partitions))
        if world_size > 1:
            _check_strides(dataset)
            stride, owner = (rank, world_size), (None, world_size)
    # A method of this name of another dataset is the user's own.
    has_fingerprint = is_partitioned(dataset) and callable(declared(dataset, "fingerprint"))
    order = dataset.fingerprint() if has_fingerprint else type(loader.dataset).__name__
    return Plan(
        PartitionSchedule(partitions, mine, loader._fl.seed, loader.in_order, stride, is_live(dataset), owner),
        None,
        states.Fingerprint("iterable", None, order, loader._fl.seed),
    )


def _fingerprint(loader: Any, kind: str, source: Any) -> states.Fingerprint:
    # With a sampler of the user, torch does not read the length of the dataset, which may therefore raise anything.
    try:
        length = len(loader.dataset)
    except Exception:  # noqa: BLE001
        length = None
    share = None if loader._fl.device is None else decode_share_of(loader.dataset)
    listing = listing_fingerprint_of(loader.dataset)
    return states.Fingerprint(kind, length, source.fingerprint(), loader._fl.seed, listing, share)
