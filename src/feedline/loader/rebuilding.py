"""Rebuilding of batches without delivery: any step, epoch and rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from feedline.core.batch import EMPTY_BATCH, BatchResult
from feedline.core.cursor import Cursor, PartitionCursor
from feedline.core.live import is_live
from feedline.core.rng_globals import restoring_globals
from feedline.core.schedule import BatchSchedule
from feedline.errors import ArgumentError
from feedline.loader import checks
from feedline.loader.building.captures import is_stateful
from feedline.loader.building.partition_builder import PartitionBuilder
from feedline.loader.monitoring.resources import rank_and_world_size
from feedline.loader.partitions import is_partitioned
from feedline.loader.plan import Plan, partitions_of, plan_of
from feedline.loader.pools import builder_of
from feedline.samplers import MaterializedSampler
from feedline.workers.inline import InlinePool

RebuiltBatch = tuple[Any, BatchResult]
"""A request and its batch."""


def batches_from(loader: Any, plan: Plan, cursor: Any) -> Iterator[RebuiltBatch]:
    """Requests and batches of one rank after `cursor`, built in this process.

    Nothing is recorded as delivered. With `seed` the random generators of the process stay as they are.
    """
    pool = _pool(loader)
    reached = [cursor]
    for request in _requests(plan, cursor, lambda: reached[0]):
        result = pool.build(request)
        is_step = result.batch is not EMPTY_BATCH
        reached[0], _ = request.advance(reached[0], result.mark, is_step)
        if is_step:
            yield request, result


def rebuild_batch(
    loader: Any, step: int, epoch: int, ranks: tuple[int, int], state: Mapping[str, Any] | None = None
) -> RebuiltBatch:
    """The request and batch of one step.

    `ranks` is rank and world size. Steps count from 0, at the start of `epoch`, or at the position of `state`.
    IndexError if the epoch has no such step; `ArgumentError` if its batch cannot be rebuilt.
    """
    if step < 0:
        raise ArgumentError(f"step must be at least 0, but is {step}")
    plan = plan_of(loader, *rank_and_world_size(ranks), partitions=partitions_of(state))
    _check_repeatable(loader, plan, state)
    cursor = plan.start_of(epoch) if state is None else plan.unpack(state)
    is_listed = isinstance(plan.sampler, MaterializedSampler)
    with restoring_globals() if is_listed else nullcontext():
        if is_listed:  # it sets generators, and those of the run must not move
            plan = copy.deepcopy(plan)
            plan.begin(cursor.epoch, state)
        found = _find(loader, plan, cursor, step)
    if found is None:
        raise IndexError(f"epoch {cursor.epoch} has no step {step} on rank {ranks[0]} of {ranks[1]}")
    return found


def _find(loader: Any, plan: Plan, cursor: Any, step: int) -> RebuiltBatch | None:
    if isinstance(cursor, PartitionCursor):  # the turn of a partition depends on the ends of all others
        return next(islice(batches_from(loader, plan, cursor), step, None), None)
    if not cursor.delivered_ahead:  # a step is a fixed number of positions, so the cursor can jump to it
        schedule: Any = plan.schedule
        each = schedule.share.world_size if isinstance(schedule, BatchSchedule) else schedule.global_batch_size
        cursor, step = Cursor(cursor.epoch, cursor.position + step * each), 0
    request = next(islice(_requests(plan, cursor, lambda: cursor), step, None), None)
    return None if request is None else (request, _pool(loader).build(request))


def _requests(plan: Plan, cursor: Any, progress: Callable[[], Any]) -> Iterator[Any]:
    schedule: Any = plan.schedule
    return schedule.requests(cursor, progress) if isinstance(cursor, PartitionCursor) else schedule.requests(cursor)  # type: ignore[no-any-return]


def _pool(loader: Any) -> InlinePool:
    builder = builder_of(loader)
    builder.reseeds = checks.keeps_sample_seeds(loader.worker_init_fn) and builder.draws
    if isinstance(builder, PartitionBuilder) and not is_partitioned(loader.dataset):
        builder.dataset = copy.deepcopy(loader.dataset)  # the run may be reading it
    return InlinePool(builder, isolate=loader._fl.seed is not None and builder.reseeds)


def _check_repeatable(loader: Any, plan: Plan, state: Mapping[str, Any] | None) -> None:
    """Raise `ArgumentError` if batches cannot be rebuilt.

    Warns if random values may differ from those of the run.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    if is_live(loader.dataset):
        raise ArgumentError(
            f"the batches of {type(loader.dataset).__name__} depend on when messages arrived: single batches cannot be"
            " built again. Iterate from a saved state"
        )
    if not is_stream and is_stateful(loader.dataset):
        raise ArgumentError(
            f"{type(loader.dataset).__name__} has a state of its own, on which its samples may depend: single batches "
            "cannot be built again. Iterate from a saved state"
        )
    if isinstance(plan.sampler, MaterializedSampler) and (state is None or not state.get("order")):
        raise ArgumentError(
            f"{type(plan.sampler.sampler).__name__} has no random access: pass state=, saved by the loader in that "
            "epoch, or use seed= with shuffle=True, or a sampler of fl.samplers"
        )
    if loader._fl.seed is None and (is_stream or getattr(builder_of(loader), "draws", True)):
        warnings.warn(
            "without seed= random values belong to the workers: those of this batch may differ from the run's. Pass"
            " seed= to the loader of the run to have them repeated",
            stacklevel=4,
        )
