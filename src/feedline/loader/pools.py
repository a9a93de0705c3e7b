"""The workers of one loader: chosen from its arguments, opened for an epoch or kept, and closed."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe, default_collate, default_convert

from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import is_stream, ranges_of, traits_of
from feedline.core.schedule import PartitionSchedule
from feedline.errors import ArgumentError, NotPicklableError
from feedline.loader import checks
from feedline.loader.autoscale import Autoscale, method_by_measurement
from feedline.loader.builder import BatchBuilder, many_at_once
from feedline.loader.device import DeviceStage, Stage, StageStatistics, open_stage
from feedline.loader.loop import Flow, Iteration, Progress
from feedline.loader.partitions import PartitionBuilder, PartitionedDataset
from feedline.loader.plan import Plan
from feedline.loader.prefetch import PrefetchingRequests
from feedline.loader.report import Context, Stats
from feedline.loader.resources import usable_cpus
from feedline.workers.base import PoolStatistics, WorkerPool
from feedline.workers.inline import InlinePool
from feedline.workers.process import fork_server
from feedline.workers.process.context import ContextLauncher
from feedline.workers.process.launch import Launcher
from feedline.workers.process.pool import ProcessPool
from feedline.workers.process.zygote import ZygoteLauncher
from feedline.workers.threads import GlobalRngCheck, ThreadPool
from feedline.workers.transport import BufferPool, Inbox

METHODS = ("auto", "thread", "process")


def check_method(loader: Any) -> None:
    """Raise `ArgumentError` where arguments of feedline's own contradict others."""
    if loader.worker_method not in METHODS:
        raise ArgumentError(f"worker_method must be one of {', '.join(METHODS)}; got {loader.worker_method!r}")
    if loader.policy.action != "raise" and isinstance(loader.dataset, IterableDataset):
        raise ArgumentError(
            f"on_error={loader.policy.action!r} is for map-style datasets: an iterator that has raised cannot be asked "
            "again for what it owes. Catch the error in __iter__ and go on there."
        )
    if loader.worker_method != "thread":
        return
    for name in ("multiprocessing_context", "worker_init_fn"):
        if getattr(loader, name) is not None:
            raise ArgumentError(f"{name} is for worker processes; leave it out, or use worker_method='process'")


def method_of(loader: Any, builder: Any, *, measure: bool = True) -> str:
    """Where the builder of this loader runs: "inline", "thread" or "process"; a guess if it may not be measured."""
    if loader.num_workers == 0:
        return "inline"
    if loader.worker_method != "auto":
        return str(loader.worker_method)
    if loader.multiprocessing_context is not None or loader.worker_init_fn is not None:
        return "process"
    safe = traits_of(loader.dataset).thread_safe
    if loader.adapts and not isinstance(loader.dataset, IterableDataset):
        if not measure:
            return "thread" if safe and builder.supports_threads else "process"
        return method_by_measurement(builder, loader.batch_size or 1, loader.seed, safe or builder.vectorized)
    if isinstance(loader.dataset, IterableDataset):
        return "thread" if safe and isinstance(loader.dataset, PartitionedDataset) else "process"
    return "thread" if safe or builder.vectorized else "process"


def builder_of(loader: Any) -> BatchBuilder | PartitionBuilder:
    """The builder that the loader's arguments mean; torch's default collate functions become feedline's own."""
    collate_fn = None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        return PartitionBuilder(loader.dataset, collate_fn, loader.batch_size, loader.drop_last)
    batched = loader.batch_sampler is not None
    return BatchBuilder(loader.dataset, collate_fn, batched, loader.policy.action)


class LoaderPools:
    """Lends a pool to each iteration of one loader. With persistent workers it is always the same pool."""

    def __init__(self) -> None:
        self._kept: WorkerPool | None = None
        self._latest: WorkerPool | None = None
        self._launcher: ZygoteLauncher | None = None
        self._stage: Stage | None = None
        self._recycled = BufferPool()
        self._method = "inline"
        self._together = False
        self._told_of_forks = False

    def iterate(self, loader: Any, plan: Plan, progress: Progress) -> Iteration:
        """Start the iteration of what remains of the progress's epoch."""
        pool = self._kept
        if pool is None:
            builder = builder_of(loader)
            self._method = method = _hosting(method_of(loader, builder), builder, plan)
            # threads share the generators of the process: nobody may seed them there
            builder.reseeds = loader.worker_init_fn is None and method != "thread" and builder.draws
            self._stage = open_stage(loader.device, pin_memory=loader.pin_memory)
            self._together = _work_together(loader, method, builder)
            # as torch, which draws for new workers only
            pool = self._open(loader, builder, method, plan.base_seed(progress.cursor.epoch, loader.generator))
        method = self._method
        self._latest = pool
        # A data pipe is seeded anew for each epoch: kept workers would hold the seeds of the first one.
        keeps = loader.persistent_workers and not isinstance(loader.dataset, IterDataPipe)
        if keeps and pool is not self._kept:
            self._kept = pool
            self._closes_kept = weakref.finalize(self, pool.close)
        requests = plan.requests(progress.cursor, lambda: progress.cursor)
        ranges = ranges_of(loader.dataset) if plan.foresees else None
        ahead = None if ranges is None else PrefetchingRequests(requests, ranges)
        iteration = Iteration(
            ahead or requests, pool, progress, _flow(loader, method, pool, self._together),
            stage=self._stage, length=plan.length, on_close=partial(self._release, pool, ahead),
        )  # fmt: skip
        if method != "inline":
            iteration.start()
        return iteration

    def prepare(self, loader: Any) -> None:
        """Let the fork server import torch in the background, if this loader will need it."""
        if loader.num_workers == 0 or loader.multiprocessing_context is not None:
            return
        if method_of(loader, builder_of(loader), measure=False) == "process":
            fork_server.start()

    def complete(self, stats: Stats, skipped: int) -> Stats:
        """The totals of the spans, with what pool and stage know."""
        pool = PoolStatistics() if self._latest is None else self._latest.statistics()
        stage = StageStatistics() if self._stage is None else self._stage.statistics()
        return replace(
            stats,
            in_flight_nbytes=pool.lent_nbytes + self._recycled.lent_nbytes + stage.in_flight_nbytes,
            arena_nbytes=pool.arena_nbytes + self._recycled.nbytes,
            copied_nbytes=stage.copied_nbytes,
            staged_nbytes=stage.staged_nbytes,
            copy_s=stage.copy_s,
            restarts=pool.restarts,
            skipped=skipped,
            workers=pool.workers,
        )

    def context(self, loader: Any) -> Context:
        """What a remedy has to be phrased in."""
        return Context(
            dataset=type(loader.dataset).__name__,
            method=self._method,
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor or 2,
            cpus=usable_cpus(),
            many_at_once=many_at_once(loader.dataset) is not None or reader_of(loader.dataset) is not None,
            device=None if loader.device is None else str(loader.device),
        )

    def close(self) -> None:
        """End every worker."""
        if self._kept is not None:
            self._closes_kept()
            self._kept = None
        if self._latest is not None:
            self._latest.close()
        self._recycled = BufferPool()
        self._drop_launcher()

    def _release(self, pool: WorkerPool, ahead: PrefetchingRequests | None) -> None:
        """An iteration is over. That it holds this method keeps the launcher of its workers alive."""
        if ahead is not None:
            ahead.close()
        if pool is not self._kept:
            pool.close()

    def _open(self, loader: Any, builder: Any, method: str, base_seed: int) -> WorkerPool:
        partitions = isinstance(loader.dataset, IterableDataset)
        if method == "inline":
            checks.shard_inline(loader.dataset)
            reseeds = loader.seed is not None and builder.reseeds
            isolate = reseeds and not (builder.vectorized and loader.policy.action == "raise")
            return InlinePool(builder, isolate=isolate, empty=self._recycled)
        if method == "thread":
            stall_s = loader.recovery.stall_s
            if loader.seed is not None and not builder.vectorized:
                builder = GlobalRngCheck(builder, loader.dataset)
            workers = loader.num_workers
            if self._together:  # two batches at once, so that what one does in Python is no pause
                builder.threads, workers = max(1, workers - 1), min(2, workers)
            return ThreadPool(
                builder, workers, empty=self._recycled, pinned=partitions, timeout_s=loader.timeout, stall_s=stall_s,
            )  # fmt: skip
        # Without a seed random values come from the workers' own generators. For them to be torch's, batch b belongs to
        # worker b modulo n, as there. Otherwise the first idle worker takes it, which waits less for slow batches.
        unseeded = loader.seed is None and builder.draws and not loader.adapts
        return ProcessPool(
            self._launching(loader, builder), loader.num_workers, base_seed=base_seed, timeout_s=loader.timeout,
            recovery=loader.recovery, pinned=partitions or unseeded, reports_generators=unseeded,
            new_inbox=self._new_inbox(),
        )  # fmt: skip

    def _new_inbox(self) -> Callable[[], Inbox]:
        """Inboxes whose slots the device stage locks into memory, so that it can copy from them as they are."""
        if not isinstance(self._stage, DeviceStage):
            return Inbox
        return partial(Inbox, register=self._stage.register, unregister=self._stage.unregister)

    def _launching(self, loader: Any, builder: Any) -> Launcher:
        """What starts the workers: the user's context, else a zygote, kept for the next epoch while nothing changes.

        A builder that cannot be pickled can still be inherited: it is forked, as torch does on Linux, with a warning.
        """
        init_fn = checks.sharding_init_fn(loader.dataset, loader.worker_init_fn)
        if loader.multiprocessing_context is not None:
            return ContextLauncher(builder, init_fn, context=loader.multiprocessing_context)
        if self._launcher is not None and self._launcher.serves(builder, init_fn):
            return self._launcher
        self._drop_launcher()
        try:
            self._launcher = launcher = ZygoteLauncher(builder, init_fn)
        except NotPicklableError as error:
            if "fork" not in torch.multiprocessing.get_all_start_methods():
                raise
            if not self._told_of_forks:
                self._told_of_forks = True
                warnings.warn(_said_of_forks(loader.dataset, error), stacklevel=5)
            return ContextLauncher(builder, init_fn, context=torch.multiprocessing.get_context("fork"))
        self._closes_launcher = weakref.finalize(self, launcher.close)
        return launcher

    def _drop_launcher(self) -> None:
        if self._launcher is not None:
            self._closes_launcher()
            self._launcher = None


def _said_of_forks(dataset: Any, error: NotPicklableError) -> str:
    if is_stream(dataset) and "._epoch " in str(error):
        return (
            "the workers are forked from this process, because a datasets.IterableDataset holds its epoch in memory"
            " that only a fork shares. Give feedline.datasets.HuggingFaceStream(dataset): its workers are fresh"
            " processes, any number of workers and ranks share its shards, and a state fits any number of them"
        )
    return f"{error} Until then the workers are forked from this process."


def _work_together(loader: Any, method: str, builder: Any) -> bool:
    """Whether all threads work on two batches, then on the next two: they are there sooner, and few lie in memory."""
    return method == "thread" and not loader.adapts and isinstance(builder, BatchBuilder) and builder.supports_threads


def _flow(loader: Any, method: str, pool: WorkerPool, together: bool) -> Flow:
    if method == "inline":
        return Flow()
    each = max(1, loader.prefetch_factor or 2)
    if together:
        return Flow(each, loader.in_order)
    if not loader.adapts or isinstance(loader.dataset, IterableDataset):  # partitions are bound to their workers
        return Flow(each * loader.num_workers, loader.in_order)
    workers = pool.statistics().workers or loader.num_workers
    return Flow(each * workers, loader.in_order, Autoscale(workers, usable_cpus()), each)


def _hosting(method: str, builder: BatchBuilder | PartitionBuilder, plan: Plan) -> str:
    """Choose the kind of pool; threads cannot host several partitions of a stream that asks torch for its worker."""
    several = isinstance(plan.schedule, PartitionSchedule) and plan.schedule.partitions > 1
    return (
        "inline" if method == "thread" and several and not isinstance(builder.dataset, PartitionedDataset) else method
    )
