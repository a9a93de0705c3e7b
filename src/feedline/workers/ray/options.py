"""Placement of Ray actors, and the kinds of pool that use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from feedline.core.optional import load
from feedline.errors import ArgumentError
from feedline.workers.base import Builder, PoolKind, PoolOptions, WorkerPool
from feedline.workers.ray.pool import RayPool

_OWN = frozenset(
    {"concurrency_groups", "get_if_exists", "lifetime", "max_concurrency", "max_restarts", "max_task_retries", "name"}
)
"""Options of Ray that would break the promises of the pool."""

WorkerPlacement = Callable[[int], Mapping[str, Any]]
"""`placement(worker_id)` returns options of `ray.remote` for one worker."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Demands of the actors of a pool, and their time limit."""

    common: Mapping[str, Any] = field(default_factory=lambda: {"num_cpus": 1})
    placement: WorkerPlacement | None = None
    start_timeout_s: float = 120.0

    __hash__ = None  # type: ignore[assignment]

    def of_worker(self, worker_id: int) -> dict[str, Any]:
        """Options of `ray.remote` for the actor of a worker."""
        own = {} if self.placement is None else dict(self.placement(worker_id))
        _check(own)
        return {**self.common, **own}

    def __call__(self, builder: Builder, options: PoolOptions) -> WorkerPool:
        """Open a pool with these options."""
        return RayPool(builder, options, self.of_worker, self.start_timeout_s)


def ray_pool(
    *, placement: WorkerPlacement | None = None, start_timeout_s: float = 120.0, **actor_options: Any
) -> PoolKind:
    """Kind of pool whose workers are Ray actors with these options.

    `actor_options` are those of `ray.remote`, such as `num_cpus` (default 1), `resources`, `label_selector`,
    `scheduling_strategy` and `runtime_env`. `placement(worker_id)` returns further options for one worker, for example
    the node that holds its files. After `start_timeout_s` seconds without a place for a worker, the pool continues
    with the others, or raises `WorkerError` if it cannot. Raises `ArgumentError` for options that belong to the pool.
    """
    _check(actor_options)
    if not start_timeout_s > 0:
        raise ArgumentError(f"start_timeout_s must be positive; got {start_timeout_s}")
    chosen = RayOptions({"num_cpus": 1, **actor_options}, placement, start_timeout_s)
    return PoolKind(
        chosen, needs_pickle=True, hosts_partitions=True, cpus=cluster_cpus, accepts=frozenset({"worker_init_fn"})
    )


def _check(options: Mapping[str, Any]) -> None:
    if refused := sorted(_OWN & options.keys()):
        raise ArgumentError(
            f"{', '.join(refused)}: feedline names, replaces and calls its Ray actors itself; leave the option out"
        )


def cluster_cpus() -> float:
    """CPUs of all live nodes; 1 if Ray is not connected."""
    ray = load("ray", "ray", "worker_method='ray'")
    total = ray.cluster_resources().get("CPU", 1.0) if ray.is_initialized() else 1.0
    return float(max(total, 1.0))
