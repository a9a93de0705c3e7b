"""Choice, opening and closing of the worker pools of a loader."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, IterDataPipe, default_collate, default_convert

from feedline.core import finalizers
from feedline.core.dataset import traits_of
from feedline.core.live import is_live
from feedline.core.numa import on_cpus
from feedline.core.rng_globals import draw_seed
from feedline.core.schedule import PartitionSchedule
from feedline.core.torch_wrappers import ranges_of
from feedline.errors import ArgumentError
from feedline.loader import checks, frameworks
from feedline.loader.building.builder import BatchBuilder
from feedline.loader.building.partition_builder import PartitionBuilder
from feedline.loader.building.prefetch import PrefetchingRequests
from feedline.loader.device import Delivery, DeliverySteps, DeviceStage, Stage, StageStatistics, open_stage
from feedline.loader.live import LiveRun
from feedline.loader.loop import Iteration
from feedline.loader.monitoring.autoscale import MOST_WORKERS, Autoscale, kind_by_measurement
from feedline.loader.monitoring.resources import available_cpus
from feedline.loader.partitions import is_partitioned, partitioned
from feedline.loader.plan import Plan
from feedline.loader.progress import Progress
from feedline.loader.repeats import EpochSetup
from feedline.loader.report import Context, Stats, context_of
from feedline.loader.step_clocks import StepClocks
from feedline.loader.window import FlowControl
from feedline.workers.base import PoolKind, PoolOptions, PoolStatistics, RetainedResources, WorkerPool
from feedline.workers.inline import InlinePool
from feedline.workers.registry import AUTO, INLINE, POOLS, PROCESSES, THREADS, find_pool
from feedline.workers.threads import GlobalRngCheck
from feedline.workers.transport import BufferPool


def check_method(loader: Any) -> None:
    """Raise `ArgumentError` if feedline's own arguments contradict others."""
    kind = None if loader._fl.worker_method == AUTO else find_pool(loader._fl.worker_method)
    action = loader._fl_policy.action
    if action != "raise" and isinstance(loader.dataset, IterableDataset) and not is_live(loader.dataset):
        raise ArgumentError(
            f"on_error={action!r} is for map-style datasets: an iterator cannot continue after it has raised. Catch "
            "the error in __iter__ and continue there."
        )
    for name in ("multiprocessing_context", "worker_init_fn"):
        if kind is not None and name not in kind.accepts and getattr(loader, name) is not None:
            raise ArgumentError(f"{name} is for worker processes; leave it out, or use worker_method='process'")


def runs_elsewhere(method: str) -> bool:
    """True if workers have CPUs of their own, such as a cluster's."""
    kind = POOLS.get(method)
    return kind is not None and kind.cpus is not None


def kind_of(loader: Any, builder: Any, *, measure: bool = True) -> PoolKind:
    """The kind of pool for this loader.

    With `measure=False`, the kind for `num_workers="auto"` is guessed from the traits of the dataset.
    """
    if loader.num_workers == 0:
        return INLINE
    if loader._fl.worker_method != AUTO:
        return find_pool(loader._fl.worker_method)
    if _starts_threads(loader.multiprocessing_context):
        return THREADS
    if loader.multiprocessing_context is not None or loader.worker_init_fn is not None:
        return PROCESSES
    safe = traits_of(loader.dataset).thread_safe
    if loader._fl_adapts and not isinstance(loader.dataset, IterableDataset):
        if not measure:
            return THREADS if safe and builder.supports_threads else PROCESSES
        return kind_by_measurement(builder, loader.batch_size or 1, loader._fl.seed, safe or builder.vectorized)
    if isinstance(loader.dataset, IterableDataset):
        return THREADS if safe and is_partitioned(loader.dataset) else PROCESSES
    return THREADS if safe or builder.vectorized else PROCESSES


def _starts_threads(context: Any) -> bool:
    """True for a context whose processes are threads, such as MONAI's.

    A worker process takes over signals, generators and standard error, which threads share with the training process.
    So feedline's own threads run instead.
    """
    process = getattr(context, "Process", None)
    return isinstance(process, type) and issubclass(process, Thread)


def builder_of(loader: Any) -> BatchBuilder | PartitionBuilder:
    """The batch builder for the arguments of a loader.

    torch's collate function for these arguments is replaced by feedline's. The other one stays, as
    `collate_fn=default_convert` for lists of samples.
    """
    batched = loader._auto_collation
    usual = default_collate if batched or loader.batch_size is not None else default_convert
    # By identity: `==` is the user's own code.
    collate_fn = None if loader.collate_fn is None or loader.collate_fn is usual else loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        dataset = partitioned(loader.dataset, loader._fl_world_size)
        arguments = dataset, collate_fn, loader.batch_size, loader.drop_last
        skips = is_live(dataset) and loader._fl_policy.action != "raise"
        return PartitionBuilder(
            *arguments, accelerate=loader._fl.accelerate, skips_failed=skips, reads_all=loader._fl_ranks.reads_all
        )
    return BatchBuilder(
        loader.dataset, collate_fn, batched, loader._fl_policy.action,
        accelerate=loader._fl.accelerate, for_device=loader._fl.device is not None,
    )  # fmt: skip


class PoolSums(NamedTuple):
    """Cumulative figures of pools and stages."""

    restarts: int = 0
    copied_nbytes: int = 0
    staged_nbytes: int = 0
    copy_s: float = 0.0
    hidden_copy_s: float = 0.0
    device_decode_s: float = 0.0
    hidden_device_decode_s: float = 0.0
    decoded: int = 0
    decode_fallbacks: int = 0
    decoded_by_workers: int = 0

    def plus(self, pool: PoolStatistics, stage: StageStatistics, decoded: tuple[int, int, int]) -> PoolSums:
        """The sums, with the figures of another pool and stage added.

        `decoded` replaces the counts of images.
        """
        return PoolSums(
            self.restarts + pool.restarts,
            self.copied_nbytes + stage.copied_nbytes,
            self.staged_nbytes + stage.staged_nbytes,
            self.copy_s + stage.copy_s,
            self.hidden_copy_s + stage.hidden_copy_s,
            self.device_decode_s + stage.decode_s,
            self.hidden_device_decode_s + stage.hidden_decode_s,
            *decoded,
        )

    def since(self, earlier: PoolSums) -> PoolSums:
        """The differences from earlier sums."""
        return PoolSums(*(now - before for now, before in zip(self, earlier, strict=True)))  # type: ignore[arg-type]


_NO_STAGE = StageStatistics()


class PersistentIteration:
    """Attribute `_iterator` of a loader: its latest iteration, if workers persist.

    Setting it to None ends the workers, as dropping torch's iterator does. Frameworks and users do this to get new
    workers.
    """

    def __get__(self, loader: Any, _: type | None = None) -> Any:
        return self if loader is None else vars(loader).get("_iterator")

    def __set__(self, loader: Any, iteration: Iteration | None) -> None:
        former, vars(loader)["_iterator"] = vars(loader).get("_iterator"), iteration
        if iteration is None and isinstance(former, Iteration):
            former._shutdown_workers()

    def __delete__(self, loader: Any) -> None:
        self.__set__(loader, None)


class LoaderPools:
    """The worker pools of one loader.

    Each iteration gets a new pool. With persistent workers, all iterations share one.
    """

    setup: EpochSetup | None = None
    """Set-up of the latest epoch, if the next one may use it."""
    is_shared = False
    """True once several threads have iterated over the loader."""

    def __init__(self) -> None:
        self._kept: WorkerPool | None = None
        self._owner = os.getpid()
        self._latest: WorkerPool | None = None
        self._stage: Stage | None = None
        self._steps: DeliverySteps | None = None
        self._decoded_before = _decode_counts()
        self._buffers = BufferPool()
        self._kind = INLINE
        self._together = False
        self._ended = self._before_epoch = PoolSums()
        self._flow = FlowControl()
        self._pipe_seed: int | None = None
        self._retained = RetainedResources()
        self.end = weakref.WeakMethod(self.close)
        """Returns `close`, or None after the end of these pools."""
        weakref.finalize(self, finalizers.run, self._retained.close)

    @property
    def has_idle_pool(self) -> bool:
        """True if persistent workers of an earlier epoch build the next one."""
        return self._kept is not None

    @property
    def keeps_objects(self) -> bool:
        """True if the latest workers report dataset and `collate_fn` unchanged."""
        return getattr(self._latest, "keeps_objects", False)

    def iterate(self, loader: Any, plan: Plan, progress: Progress) -> Iteration:
        """Start an iteration over the rest of the epoch of `progress`."""
        pool = self._kept if loader.num_workers else None  # the user may set it to 0 later
        self._before_epoch = self._sums()
        if pool is None:
            self._ended, self._latest = self._before_epoch, None
            builder = builder_of(loader)
            self._kind = kind = kind_for_stream(kind_of(loader, builder), builder, _partitions(plan))
            # Threads share the generators: seeding them would change the draws of another thread's sample.
            seeds = loader._fl.seed is not None and checks.keeps_sample_seeds(loader.worker_init_fn)
            builder.reseeds = seeds and not kind.shares_rng and builder.draws
            self._stage = open_stage(loader._fl.device, pin_memory=loader.pin_memory)
            self._together = _work_together(loader, kind, builder)
            # As in torch, the base seed is drawn only when workers start.
            base_seed = self._base_seed(loader, plan, progress.cursor.epoch)
            device = loader._fl.device
            with on_cpus(device.cpus) if isinstance(device, Delivery) else nullcontext():
                pool = self._open(loader, builder, kind, base_seed)
            self.setup = EpochSetup.of(loader, plan, builder, pool)
        kind = self._kind
        self._latest = pool
        # A data pipe is seeded for each epoch: persistent workers would keep the seeds of the first one.
        keeps = loader.persistent_workers and loader.num_workers and not isinstance(loader.dataset, IterDataPipe)
        if keeps and pool is not self._kept:
            self._kept, self._owner = pool, os.getpid()
            self._closes_kept = weakref.finalize(self, finalizers.run, pool.close)
        requests = plan.requests(progress.cursor, lambda: progress.cursor, progress.run)
        frameworks.skip_delivered(loader, progress, requests)
        ranges = ranges_of(loader.dataset) if plan.allows_lookahead else None
        ahead = None if ranges is None else PrefetchingRequests(requests, ranges)
        self._flow = _flow_control(loader, kind, pool, self._together)
        live = LiveRun.of(loader.dataset, plan)
        is_held = ahead is not None or live is not None or type(pool) is not InlinePool or pool.holds_streams
        on_close = partial(self._release, pool, ahead, live) if is_held else None
        iteration = self._iteration(plan, progress, ahead or requests, pool, on_close)
        iteration.live = live
        iteration.last_steps = self._last_steps(loader._fl.device)
        end = getattr(pool, "end_when_answered", None)  # worker processes have it
        if pool is not self._kept and end is not None:
            iteration.end_workers = lambda: end(progress.heartbeat.keep_workers)
        if kind.works_ahead:
            iteration.start()
        return iteration

    def iterate_again(self, loader: Any, setup: EpochSetup, progress: Progress) -> Iteration:
        """Start a whole epoch in the pool of the previous one."""
        plan = setup.plan
        schedule: Any = plan.schedule
        if _DECODERS in sys.modules:  # nothing else counts without workers
            self._before_epoch = self._sums()
        plan.base_seed(progress.cursor.epoch, loader.generator)
        requests = schedule.requests(progress.cursor)
        frameworks.skip_delivered(loader, progress, requests)
        setup.clocks.begin_again()
        setup.pool.unanswered.clear()  # of an epoch that an interrupt has ended
        return self._iteration(plan, progress, requests, setup.pool, None, setup.clocks)

    def _iteration(
        self, plan: Plan, progress: Progress, requests: Any, pool: WorkerPool, on_close: Callable[[], None] | None,
        clocks: StepClocks | None = None,
    ) -> Iteration:  # fmt: skip
        begun = progress.cursor
        iteration = Iteration(
            requests, pool, progress, self._flow, clocks,
            stage=self._stage, length=lambda: plan.remaining(begun), on_close=on_close,
            restart=lambda cursor: plan.requests(cursor, lambda: progress.cursor, progress.run),
        )  # fmt: skip
        iteration.delivered = lambda: plan.delivered(progress.end or progress.cursor)
        return iteration

    def _last_steps(self, device: Any) -> DeliverySteps | None:
        """Steps on the device; they live as long as the loader."""
        if not isinstance(device, Delivery):
            return None
        if self._steps is None:
            self._steps = DeliverySteps(device)
        return self._steps

    def prepare(self, loader: Any) -> None:
        """Start the pools' resources in the background, such as the fork server."""
        if loader.num_workers == 0 or loader.multiprocessing_context is not None:
            return
        kind = kind_of(loader, builder_of(loader), measure=False)
        if kind.prepare is not None:
            kind.prepare()

    def with_pool_figures(self, stats: Stats, skipped: int, *, since_epoch: bool = False) -> Stats:
        """`stats`, completed with the figures of the pools and stages.

        Sums are those of all epochs, or with `since_epoch` of the current one.
        """
        pool, stage = self.pool_statistics(), self._stage_statistics()
        sums = self._sums().since(self._before_epoch) if since_epoch else self._sums()
        return replace(
            stats,
            in_flight_nbytes=pool.lent_nbytes + self._buffers.lent_nbytes + stage.in_flight_nbytes,
            arena_nbytes=pool.arena_nbytes + self._buffers.nbytes,
            copied_nbytes=sums.copied_nbytes,
            staged_nbytes=sums.staged_nbytes,
            copy_s=sums.copy_s,
            hidden_copy_s=sums.hidden_copy_s,
            device_decode_s=sums.device_decode_s,
            hidden_device_decode_s=sums.hidden_device_decode_s,
            decoded_on_device=sums.decoded,
            decode_fallbacks=sums.decode_fallbacks,
            decoded_by_workers=sums.decoded_by_workers,
            restarts=sums.restarts,
            skipped=skipped,
            workers=pool.workers,
        )

    def _count_decoded(self) -> tuple[int, int, int]:
        """The counts of `_decode_counts` since this object was created."""
        (decoded, fallbacks, by_workers), before = _decode_counts(), self._decoded_before
        return decoded - before[0], fallbacks - before[1], by_workers - before[2]

    def opened_states(self, run: int, epoch: int) -> Mapping[int, Any]:
        """The states of streams that were opened without workers, by partition.

        Only of those that an iteration has opened in `epoch`, and that have given no batch.
        """
        return self._latest.opened_states(run, epoch) if isinstance(self._latest, InlinePool) else {}

    def pool_statistics(self) -> PoolStatistics:
        """Current figures of the latest pool."""
        return PoolStatistics() if self._latest is None else self._latest.statistics()

    def _stage_statistics(self) -> StageStatistics:
        return _NO_STAGE if self._stage is None else self._stage.statistics()

    def _sums(self) -> PoolSums:
        if self._latest is None:  # the figures of the former stage are among those of the ended pools
            return self._ended
        return self._ended.plus(self.pool_statistics(), self._stage_statistics(), self._count_decoded())

    def context(self, loader: Any) -> Context:
        """The setup of the loader, for the advice of a verdict."""
        builder = builder_of(loader)
        with_workers = self._kind if loader.num_workers else _kind_with_workers(loader, builder)
        context = context_of(loader, builder, self._kind, with_workers, together=self._together)
        tuner = self._flow.tuner
        return replace(
            context, adapts=loader._fl_adapts, num_workers=context.num_workers if tuner is None else tuner.workers
        )

    def drop_unusable(self) -> None:
        """Forget a kept pool that cannot serve the next iteration.

        That is so in a forked child, which has none of the workers, and after an error that ended them.
        """
        if self._kept is None:
            return
        if os.getpid() != self._owner:
            self._closes_kept.detach()
            self._kept = None
        elif not getattr(self._kept, "is_usable", True):  # pools of other projects have no such property
            self._closes_kept()
            self._kept = None

    def renew(self, *, running: bool) -> None:
        """Let the next iteration open a new pool.

        The present pool ends with its iteration, or now if none is `running`.
        """
        if running:
            self._kept = None
        else:
            self.close()

    def close(self) -> None:
        """Stop all workers and release retained resources."""
        self.setup = None
        if self._kept is not None:
            self._closes_kept()
            self._kept = None
        if self._latest is not None:
            self._latest.close()
        self._buffers = BufferPool()
        self._retained.close()

    def _release(self, pool: WorkerPool, ahead: PrefetchingRequests | None, live: LiveRun | None) -> None:
        """Close the pool of a finished iteration, unless it is persistent.

        The iteration holds this bound method, which keeps the launcher of its workers alive.
        """
        if ahead is not None:
            ahead.close()
        if live is not None:
            live.stop_waiting()
        if pool is not self._kept:
            pool.close()
        if live is not None:  # after the workers, which may be threads that read
            live.finish()

    def _base_seed(self, loader: Any, plan: Plan, epoch: int) -> int:
        """The base seed of new workers; without `seed`, drawn as in torch."""
        if self._pipe_seed is not None:  # torch's persistent workers draw no other one
            return self._pipe_seed + epoch
        base_seed = plan.base_seed(epoch, loader.generator)
        if loader.num_workers and isinstance(loader.dataset, IterDataPipe):
            draw_seed(loader.generator)  # torch draws one more after the start of the workers: an equal state
            self._pipe_seed = base_seed if loader.persistent_workers else None
        return base_seed

    def _open(self, loader: Any, builder: Any, kind: PoolKind, base_seed: int) -> WorkerPool:
        if not kind.works_ahead:
            checks.shard_datapipe(loader.dataset)
        seeded = loader._fl.seed is not None
        restores_rng = seeded and builder.reseeds and not (builder.vectorized and loader._fl_policy.action == "raise")
        stage = self._stage if isinstance(self._stage, DeviceStage) else None
        allocate = self._buffers if stage is None else stage.buffers
        if not loader.num_workers:  # all other options are for workers
            return InlinePool(builder, isolate=restores_rng, allocate=allocate)
        workers, build = loader.num_workers, builder
        if self._together:  # two batches at once: one computes while the other runs Python code
            builder.threads, workers = max(1, workers - 1), min(2, workers)
        if kind.shares_rng and seeded and not builder.vectorized:
            build = GlobalRngCheck(builder, loader.dataset)
        init_fn = checks.sharding_init_fn(loader.dataset, loader.worker_init_fn)
        if init_fn is not None and "worker_init_fn" not in kind.accepts:
            checks.warn_of_init_fn(init_fn)
        options = PoolOptions(
            num_workers=workers,
            partitions=isinstance(loader.dataset, IterableDataset),
            unseeded=((not seeded and builder.draws) or builder.is_stateful) and not loader._fl_adapts,
            timeout_s=loader.timeout,
            recovery=loader._fl.recovery,
            base_seed=base_seed,
            worker_init_fn=init_fn if "worker_init_fn" in kind.accepts else None,
            multiprocessing_context=loader.multiprocessing_context,
            allocate=allocate,
            restores_rng=restores_rng,
            # The device stage page-locks registered memory, so copies from it need no staging.
            register_memory=None if stage is None else stage.register,
            unregister_memory=None if stage is None else stage.unregister,
            retained=self._retained,
        )
        return kind.open(build, options)


def _kind_with_workers(loader: Any, builder: Any) -> PoolKind:
    """The kind of pool of this loader, if it had workers."""
    if loader._fl.worker_method != AUTO:
        return find_pool(loader._fl.worker_method)
    is_stream = isinstance(loader.dataset, IterableDataset) and not is_partitioned(loader.dataset)
    safe = traits_of(loader.dataset).thread_safe or builder.vectorized
    return THREADS if safe and not is_stream else PROCESSES


_DECODERS = "feedline.images.device_decoders"


def _decode_counts() -> tuple[int, int, int]:
    """Images sent to accelerators, fallbacks among them, and images of workers."""
    module = sys.modules.get(_DECODERS)  # most loaders do without image kernels
    return (0, 0, 0) if module is None else module.counts()


def _work_together(loader: Any, kind: PoolKind, builder: Any) -> bool:
    """True if all threads work on the same two batches.

    Batches are complete sooner than with one thread per batch, and fewer are in memory.
    """
    return (
        kind.splits_batches and not loader._fl_adapts and isinstance(builder, BatchBuilder) and builder.supports_threads
    )


def _flow_control(loader: Any, kind: PoolKind, pool: WorkerPool, together: bool) -> FlowControl:
    if not kind.works_ahead:
        return FlowControl()
    each = max(1, loader.prefetch_factor or 2)
    if together:
        return FlowControl(each, loader.in_order)
    if is_live(loader.dataset):  # a partition without messages must not hold back the others
        return FlowControl(each * loader.num_workers, in_order=False)
    is_fixed = isinstance(loader.dataset, IterableDataset) or not kind.resizable  # a partition stays with its worker
    if is_fixed or not loader._fl_adapts:
        return FlowControl(each * loader.num_workers, loader.in_order)
    workers = pool.statistics().workers or loader.num_workers
    context = Context(
        pool=kind, num_workers=workers, prefetch_factor=each, in_order=loader.in_order,
        cpus=(kind.cpus or available_cpus)(),
    )  # fmt: skip
    return FlowControl(each * workers, loader.in_order, Autoscale(workers, max(MOST_WORKERS, workers), context), each)


def kind_for_stream(kind: PoolKind, builder: BatchBuilder | PartitionBuilder, partitions: int) -> PoolKind:
    """`kind`, or inline if it cannot host the partitions of the stream.

    A stream that shards itself by torch's `get_worker_info()` needs a pool that hosts partitions.
    """
    is_hosted = kind.hosts_partitions or partitions < 2 or is_partitioned(builder.dataset)
    return kind if is_hosted else INLINE


def _partitions(plan: Plan) -> int:
    return plan.schedule.partitions if isinstance(plan.schedule, PartitionSchedule) else 0
