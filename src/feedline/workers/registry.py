"""Table of worker pools: four built-in kinds, and those that users register."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from feedline.core.arguments import one_of_error
from feedline.core.huggingface import is_stream
from feedline.errors import ArgumentError, NotPicklableError
from feedline.workers.base import Builder, PoolKind, PoolOptions, WorkerPool
from feedline.workers.inline import InlinePool
from feedline.workers.process import fork_server
from feedline.workers.process.context import ContextLauncher
from feedline.workers.process.launch import Launcher
from feedline.workers.process.pool import ProcessPool
from feedline.workers.process.snapshot import SnapshotLauncher
from feedline.workers.process.zygote import ZygoteLauncher
from feedline.workers.ray.options import ray_pool
from feedline.workers.threads import ThreadPool
from feedline.workers.transport import Inbox
from feedline.workers.wait_samples import ProcessSamples

AUTO = "auto"
"""Name that leaves the choice of a kind to the loader. No kind can be registered under it."""


class LauncherCache:
    """Launchers of one loader; keeps its zygote while nothing changes."""

    def __init__(self) -> None:
        self._zygote: ZygoteLauncher | None = None
        self._inherits = True
        self._has_warned = False

    def get(self, builder: Any, init_fn: Callable[[int], object] | None, context: Any) -> Launcher:
        """Launcher for the workers of a builder.

        Where torch would fork, it forks a snapshot, or after an inherited lock a zygote. Elsewhere it uses the user's
        context, or without one a zygote. If the builder cannot be pickled for a zygote, multiprocessing starts the
        workers by the method that the user has set. If none is set, workers are forked from this process, with a
        warning. Raises NotPicklableError if the system cannot fork.
        """
        if _start_method(context) == "fork":
            return self._forking(builder, init_fn) if self._inherits else self._fresh(builder, init_fn)
        if context is not None:
            return ContextLauncher(builder, init_fn, context=context)
        try:
            return self._fresh(builder, init_fn)
        except NotPicklableError as error:
            chosen: str | None = multiprocessing.get_start_method(allow_none=True)
            if chosen is not None:
                return ContextLauncher(
                    builder, init_fn, context=multiprocessing.get_context(), note=f"feedline: {error}"
                )
            if "fork" not in multiprocessing.get_all_start_methods():
                raise
            if not self._has_warned:
                self._has_warned = True
                # stacklevel: the line of the user that calls iter(loader)
                warnings.warn(_describe_fork(builder.dataset, error), stacklevel=6)
            return self._forking(builder, init_fn)

    def close(self) -> None:
        """End the zygote once its pools are closed."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()

    def _forking(self, builder: Any, init_fn: Callable[[int], object] | None) -> SnapshotLauncher:
        return SnapshotLauncher(builder, init_fn, fresh=self._give_up_forking)

    def _give_up_forking(self, builder: Any, init_fn: Callable[[int], object] | None) -> ZygoteLauncher:
        """Launcher to use after a worker waited for an inherited lock.

        This loader no longer forks the training process: later forks would inherit the lock, too.
        """
        zygote = self._fresh(builder, init_fn)
        self._inherits = False
        return zygote

    def _fresh(self, builder: Any, init_fn: Callable[[int], object] | None) -> ZygoteLauncher:
        if self._zygote is None or not self._zygote.matches(builder, init_fn):
            self.close()
            self._zygote = ZygoteLauncher(builder, init_fn)
        return self._zygote


def _start_method(context: Any) -> str:
    """Start method of torch's workers: that of the context, or the default."""
    if context is not None:
        return str(context.get_start_method())
    chosen: str | None = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def _describe_fork(dataset: Any, error: NotPicklableError) -> str:
    if is_stream(dataset) and "._epoch " in str(error):
        return (
            "the workers are forked from this process, because a datasets.IterableDataset holds its epoch in memory"
            " that only a fork shares. Give feedline.datasets.HuggingFaceStream(dataset): its workers are fresh"
            " processes, any number of workers and ranks share its shards, and a state fits any number of them"
        )
    return f"{error} Until then the workers are forked from this process."


def _open_inline(builder: Builder, options: PoolOptions) -> WorkerPool:
    return InlinePool(builder, isolate=options.restores_rng, allocate=options.allocate)


def _open_threads(builder: Builder, options: PoolOptions) -> WorkerPool:
    return ThreadPool(
        builder, options.num_workers, allocate=options.allocate, round_robin=options.partitions,
        timeout_s=options.timeout_s, stall_s=options.recovery.stall_s,
    )  # fmt: skip


def _open_processes(builder: Builder, options: PoolOptions) -> WorkerPool:
    launchers = options.retained.get(LauncherCache)
    return ProcessPool(
        launchers.get(builder, options.worker_init_fn, options.multiprocessing_context), options.num_workers,
        base_seed=options.base_seed, timeout_s=options.timeout_s, recovery=options.recovery,
        round_robin=options.partitions or options.unseeded, reports_generators=options.unseeded,
        new_inbox=partial(Inbox, register=options.register_memory, unregister=options.unregister_memory),
        opens_late=True, samples=options.retained.get(ProcessSamples),
    )  # fmt: skip


def _prepare_processes() -> None:
    if _start_method(None) != "fork":
        fork_server.start()


INLINE = PoolKind(_open_inline, works_ahead=False, hosts_partitions=True, resizable=False)
THREADS = PoolKind(_open_threads, shares_rng=True, splits_batches=True)
PROCESSES = PoolKind(
    _open_processes,
    needs_pickle=True,
    hosts_partitions=True,
    accepts=frozenset({"multiprocessing_context", "worker_init_fn"}),
    prepare=_prepare_processes,
)

POOLS: dict[str, PoolKind] = {"inline": INLINE, "thread": THREADS, "process": PROCESSES, "ray": ray_pool()}
"""Every kind of pool by its name; add one with `register_pool`."""

_added: dict[str, PoolKind] = {}


def register_pool(name: str, kind: PoolKind) -> None:
    """Let `DataLoader(worker_method=name)` open pools of this kind.

    Raises `ArgumentError` if another kind has this name, if an argument is invalid, or if `works_ahead` is False.
    """
    _check_row(name, kind)
    if not kind.works_ahead:
        raise ArgumentError(
            f"pool {name!r} has works_ahead=False: without workers the loader builds batches itself, in its own pool"
        )
    if POOLS.get(name, kind) != kind:
        raise ArgumentError(f"another kind of pool is already named {name!r}: choose another name")
    if name not in POOLS:
        POOLS[name] = _added[name] = kind


def unregister_pool(name: str) -> None:
    """Remove a kind of pool that `register_pool` has added.

    Raises `ArgumentError` for other names.
    """
    if name not in _added:
        raise ArgumentError(f"unregister_pool({name!r}): no such pool was registered; there are {sorted(_added)}")
    del POOLS[name], _added[name]


def _check_row(name: Any, kind: Any) -> None:
    if not isinstance(name, str) or name in {"", AUTO}:
        raise ArgumentError(f"the name of a kind of pool must be a string other than '' and {AUTO!r}; got {name!r}")
    if not isinstance(kind, PoolKind):
        raise ArgumentError(f"pool {name!r} must be a feedline.workers.PoolKind; got {type(kind).__name__}")
    if not callable(kind.open):
        raise ArgumentError(
            f"pool {name!r}: PoolKind(open=...) must be a function of (builder, options), not {kind.open!r}"
        )


def find_pool(name: str) -> PoolKind:
    """Kind of pool that `worker_method=name` chooses.

    Raises `ArgumentError` for an unknown name.
    """
    kind = POOLS.get(name)
    if kind is None or not kind.works_ahead:
        remedy = "feedline.workers.register_pool adds a kind of pool"
        raise one_of_error("worker_method", name, worker_methods(), remedy)
    return kind


def worker_methods() -> list[str]:
    """Valid values of a loader's `worker_method`."""
    return [AUTO, *(name for name, kind in POOLS.items() if kind.works_ahead)]
