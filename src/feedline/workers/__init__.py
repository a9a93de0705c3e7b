"""Worker pools: inline, threads, processes, and pools that users register."""

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
