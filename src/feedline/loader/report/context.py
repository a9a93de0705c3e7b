"""Setup of a loader, as far as a verdict needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from feedline.loader.report.replay import INLINE, PROCESS, THREAD, EngineSetting
from feedline.loader.report.sources import SampleSource
from feedline.workers.base import PoolKind
from feedline.workers.registry import INLINE as INLINE_POOL
from feedline.workers.registry import PROCESSES


@dataclass(frozen=True, slots=True)
class Context:
    """Setup of the loader, for the advice of a verdict."""

    dataset: str = "the dataset"
    """Its class name."""
    pool: PoolKind = INLINE_POOL
    """The kind of pool that builds the batches."""
    pool_with_workers: PoolKind = PROCESSES
    """The kind of pool that would build them with `num_workers` above 0."""
    num_workers: int = 0
    adapts: bool = False
    """True if the loader chooses `num_workers` itself."""
    prefetch_factor: int = 2
    in_order: bool = True
    persistent_workers: bool = False
    pinned: bool = False
    """True if batch b belongs to worker b modulo `num_workers`."""
    cpus: float = 1.0
    """CPUs that affinity and quota allow."""
    throttled: bool = False
    """True if the quota has stopped this process for a while."""
    many_at_once: bool = False
    """True if the dataset returns many samples per call (`__getitems__`, `read_batch`)."""
    thread_safe: bool = False
    shares_itself_out: bool = True
    """False for a stream of which every worker would read all samples."""
    most_workers: int | None = None
    """Workers that find something to do: partitions of a stream; None without a limit."""
    together: bool = False
    """True if native threads work together on each batch."""
    device: str | None = None
    sampler: str = ""
    """Class name of a sampler of the user's; empty for feedline's own order."""
    collate_fn: str = ""
    """Name of the user's collate function; empty for default collate."""
    epoch_batches: int | None = None
    """Batches per epoch; None where unknown."""
    source: SampleSource = field(default_factory=SampleSource)
    """What the dataset reads its samples with."""

    @property
    def setting(self) -> EngineSetting:
        """The arguments that decide how batches overlap."""
        method = method_of(self.pool)
        workers = 0 if method == INLINE else max(1, min(2, self.num_workers) if self.together else self.num_workers)
        return EngineSetting(workers, self.prefetch_factor, self.in_order, method, self.pinned)

    def has(self, arguments: Mapping[str, Any]) -> bool:
        """True if there are arguments, and all of them are set already."""
        return bool(arguments) and all(getattr(self, name, None) == value for name, value in arguments.items())


def method_of(kind: PoolKind) -> str:
    """The model's name of a kind of pool."""
    if not kind.works_ahead:
        return INLINE
    return THREAD if kind.shares_rng else PROCESS
