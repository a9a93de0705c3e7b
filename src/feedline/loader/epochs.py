"""Start of an epoch, and its state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from threading import get_ident
from time import monotonic_ns
from typing import Any

from torch.utils.data import IterableDataset

from feedline.core.cursor import Cursor
from feedline.core.rng_globals import global_states
from feedline.loader import checks
from feedline.loader.error_policy import Quarantine
from feedline.loader.live import LiveRun
from feedline.loader.loop import Iteration, LoaderArguments, live_iterations
from feedline.loader.monitoring.metrics import serve_if_configured
from feedline.loader.partitions import keep_dataset_states, with_initial_states
from feedline.loader.plan import Plan
from feedline.loader.progress import Progress
from feedline.loader.ranks.agreement import Agreement
from feedline.loader.ranks.contract import Terms, is_in_step
from feedline.loader.rebuilding import batches_from
from feedline.loader.repeats import EpochSetup
from feedline.loader.state import part_of, resume_quarantine
from feedline.loader.worker_states import (
    WorkerStates,
    pack_workers,
    process_generators,
    restore_process,
    saved_generator,
)

_arguments_of: Callable[[Any], tuple[Any, ...]] = attrgetter(
    *(f"_{name}" if name in ("index_sampler", "auto_collation") else name for name in LoaderArguments._fields)
)


def start_epoch(loader: Any) -> Iteration:
    """Iterate over the next epoch, or the rest of a loaded one."""
    began_ns = monotonic_ns()
    # In one step: another thread may begin an epoch of the same loader.
    setup: EpochSetup | None = vars(loader._fl_pools).pop("setup", None)
    if setup is not None and setup.thread != get_ident():
        loader._fl_pools.is_shared, setup = True, None
    if setup is not None and setup.fits(loader):
        iteration, progress = _begin_again(loader, setup)
    else:
        iteration, progress = _begin_new(loader)
    loader._fl_live.add(iteration)
    if loader.persistent_workers and loader.num_workers:
        iteration.follow(loader._iterator)
        loader._iterator = iteration
    progress.totals.add_startup(monotonic_ns() - began_ns)
    return iteration


def _begin_new(loader: Any) -> tuple[Iteration, Progress]:
    if loader._iterator is not None:
        loader._iterator.close()
    loader._fl_pools.drop_unusable()
    plan, progress = _begin(loader, loader._fl_resume)
    serve_if_configured()
    loader._fl_monitor.begin(progress, plan, loader._fl_pools, loader)
    iteration: Iteration = loader._fl_pools.iterate(loader, plan, progress)
    if is_in_step(loader._fl_ranks):
        iteration.agreement = Agreement(
            loader._fl_ranks.uneven, lambda: batches_from(loader, plan, plan.start_of(progress.cursor.epoch))
        )
    if not loader.num_workers and isinstance(loader.dataset, IterableDataset):
        if loader._fl.seed is None:
            plan.workers.starts.setdefault(0, global_states())
        iteration.open_stream()
    _connect(iteration, loader, plan, progress)
    _adopt(loader, plan, progress)
    return iteration, progress


def _begin_again(loader: Any, setup: EpochSetup) -> tuple[Iteration, Progress]:
    """Begin a whole epoch with the set-up of the one before.

    Each step is one of `_begin_new`, in the same order.
    """
    plan, monitor, former = setup.plan, loader._fl_monitor, loader._fl_progress
    order = setup.order()
    try:
        setup.builder.follow()
        plan.workers.base_seed = None
        epoch = plan.upcoming(loader._fl_epoch)
        plan.end()
        plan.begin(epoch, None)
        quarantine = resume_quarantine(loader._fl_policy, former.quarantine, None)
        progress = former.following(Cursor(epoch), quarantine, monitor)
        serve_if_configured()
        monitor.begin_again(progress)
        iteration: Iteration = loader._fl_pools.iterate_again(loader, setup, progress)
        _connect(iteration, loader, plan, progress)
        _adopt(loader, plan, progress)
    except BaseException:
        # The state is that of the former epoch, whose order it must hold.
        setup.restore(order)
        raise
    setup.follow(iteration)
    loader._fl_pools.setup = setup
    return iteration, progress


def _adopt(loader: Any, plan: Plan, progress: Progress) -> None:
    """Let the loader's state be that of a new epoch.

    Only now: after an error before, the loaded state is still there for another try.
    """
    vars(loader).update(_fl_plan=plan, _fl_progress=progress, _fl_resume=None, _fl_epoch=progress.cursor.epoch + 1)


def _begin(loader: Any, state: Mapping[str, Any] | None) -> tuple[Plan, Progress]:
    """Plan and progress of the next epoch, or of a loaded one.

    The order of these steps matters: checks come before anything is drawn or counted, and seeds are drawn as torch
    draws them.
    """
    former = loader._fl_progress
    if loader._fl_has_own_order:
        checks.warn_of_equal_data(loader.dataset, loader._fl.distributed)
    plan = _restored_plan(loader, state)
    if former is not None and loader._fl_pools.has_idle_pool:
        plan.workers.follow(former.workers)
    cursor = plan.start_of(plan.upcoming(loader._fl_epoch)) if state is None else plan.unpack(state)
    if loader._fl_world_size > 1:
        loader._fl_contract.check(loader._fl_ranks, loader._fl_rank, Terms.of(loader, plan, cursor))
    cursor = keep_dataset_states(cursor, None if state is not None or former is None else former.cursor)
    live = LiveRun.of(loader.dataset, plan)
    if live is not None:
        cursor = live.begin(cursor, former.cursor if state is None and former is not None else None)
    checks.seed_datapipe(loader.dataset, loader.generator)
    if loader._fl_plan is not None and all(
        each.closed or not each.advances(former) for each in live_iterations(loader)
    ):
        loader._fl_plan.end()
    starts_workers = bool(loader.num_workers) and loader._fl.seed is None and not loader._fl_pools.has_idle_pool
    plan.begin(cursor.epoch, state, with_workers=starts_workers)
    quarantine = resume_quarantine(loader._fl_policy, None if former is None else former.quarantine, state)
    return plan, Progress.of(loader, cursor, plan, quarantine)


def _connect(iteration: Iteration, loader: Any, plan: Plan, progress: Progress) -> None:
    """Connect a new iteration to the loader's monitor, ranks and workers."""
    iteration.monitor, iteration.rank = loader._fl_monitor, (loader._fl_rank, loader._fl_world_size)
    iteration.on_shutdown, iteration.arguments = loader._fl_pools.end, LoaderArguments._make(_arguments_of(loader))
    # Workers without a seed have begun, as torch's.
    if (loader._fl.seed is not None or not loader.num_workers) and plan.takes_epochs:
        iteration.late_start = _late_start(loader, plan, progress)


def _late_start(loader: Any, plan: Plan, progress: Progress) -> Callable[[], Iterator[Any] | None]:
    """Function that returns the requests of an epoch set late, or None.

    An epoch set after `iter(loader)`, before the first batch, still takes effect.
    """
    reference = weakref.ref(loader)  # the iteration must not keep the loader alive

    def start() -> Iterator[Any] | None:
        cursor, owner = progress.cursor, reference()
        if owner is None:
            return None
        epoch = plan.upcoming(cursor.epoch)
        if cursor != plan.start_of(cursor.epoch) or owner._fl_progress is not progress:
            return None
        if epoch == cursor.epoch:
            plan.mark_epoch_read(epoch)
            return None
        progress.cursor = plan.start_of(epoch)
        plan.begin(epoch, None)
        owner._fl_epoch = epoch + 1
        return plan.requests(progress.cursor, lambda: progress.cursor, progress.run)

    return start


def _restored_plan(loader: Any, state: Mapping[str, Any] | None) -> Plan:
    """The plan of the next iteration.

    Restores the generators of this process and the dataset from `state`.
    """
    restore_process(part_of(state, "random"))
    for source, saved in saved_generator(loader, part_of(state, "workers")).items():
        source.write(saved)
    plan: Plan = loader._fl_make_plan(state).with_workers_of(state, loader.num_workers, loader._fl_rank)
    if state is not None and not loader._fl_repeats:
        loader._fl_pools.close()  # persistent workers have other states than the loaded ones
    if plan.workers.dataset is not None:
        loader.dataset.load_state_dict(plan.workers.dataset)
    return plan


def pack_epoch(loader: Any, *, random: bool) -> dict[str, Any]:
    """The state of the current epoch; with `random`, with this process's generators."""
    if loader._fl_resume is not None:
        return dict(loader._fl_resume)
    progress: Progress | None = loader._fl_progress
    plan: Plan | None = loader._fl_plan
    if progress is not None and plan is not None and not progress.is_over:
        plan.draw_first()  # before any generator is read: this may draw from it
    generators = process_generators() if random else None
    if progress is None or plan is None:
        plan = loader._fl_make_plan()
        cursor, quarantine = plan.start_of(plan.upcoming(loader._fl_epoch)), Quarantine(loader._fl_policy)
        workers = pack_workers(loader, WorkerStates(loader.num_workers), over=True)
        return plan.pack(cursor, quarantine, workers=workers, random=generators)
    workers = pack_workers(loader, progress.workers, over=progress.is_over)
    cursor = with_initial_states(loader, progress.cursor, progress.run)
    return plan.pack(cursor, progress.quarantine, over=progress.is_over, workers=workers, random=generators)
