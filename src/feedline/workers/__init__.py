"""Where batch builders run: inline, in threads, in processes, or in a pool that the user registers."""

from feedline.workers.base import BatchFuture, Builder, PoolKind, PoolOptions, PoolStatistics, Recovery, WorkerPool
from feedline.workers.registry import POOLS, register_pool

__all__ = [
    "POOLS",
    "BatchFuture",
    "Builder",
    "PoolKind",
    "PoolOptions",
    "PoolStatistics",
    "Recovery",
    "WorkerPool",
    "register_pool",
]
