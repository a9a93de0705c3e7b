"""Worker pools: inline, threads, processes, Ray actors, and pools that users register."""

from feedline.workers.base import BatchFuture, Builder, PoolKind, PoolOptions, PoolStatistics, Recovery, WorkerPool
from feedline.workers.ray.options import ray_pool
from feedline.workers.registry import POOLS, register_pool, unregister_pool

__all__ = [
    "POOLS",
    "BatchFuture",
    "Builder",
    "PoolKind",
    "PoolOptions",
    "PoolStatistics",
    "Recovery",
    "WorkerPool",
    "ray_pool",
    "register_pool",
    "unregister_pool",
]
