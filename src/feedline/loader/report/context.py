"""Parts of a loader's setup that a verdict needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, default_collate

from feedline.collate.batch_reads import reader_of
from feedline.core.cgroups import Cgroup
from feedline.core.copying import CopyRates
from feedline.core.dataset import traits_of
from feedline.core.huggingface import is_stream as is_huggingface_stream
from feedline.core.torch_wrappers import batch_getter
from feedline.loader.device import Delivery
from feedline.loader.monitoring.resources import available_cpus
from feedline.loader.partitions import is_partitioned
from feedline.loader.report.replay import INLINE, PROCESS, THREAD, EngineSetting, Task
from feedline.loader.report.sources import LineShare, SampleSource, shards_itself, source_of
from feedline.samplers import Shuffled
from feedline.workers.base import PoolKind
from feedline.workers.registry import INLINE as INLINE_POOL
from feedline.workers.registry import PROCESSES

THROTTLED_SHARE = 0.05
"""Share of the quota's periods that were cut short; a job above it counts as throttled."""


class SendingCost(NamedTuple):
    """Work of sending one batch from a worker process."""

    packing: Task
    unpacking: Task


@dataclass(frozen=True, slots=True)
class Context:
    """Setup of the loader, for the advice of a verdict."""

    dataset: str = "the dataset"
    """Class name of the dataset."""
    reads_by: str = "__getitem__"
    """Method of the dataset that reads samples; "__iter__" of a stream."""
    pool: PoolKind = INLINE_POOL
    """The kind of pool that builds the batches."""
    pool_with_workers: PoolKind = PROCESSES
    """The kind of pool that would build the batches with `num_workers` above 0."""
    num_workers: int = 0
    adapts: bool = False
    """True if the loader chooses `num_workers` itself."""
    prefetch_factor: int = 2
    in_order: bool = True
    persistent_workers: bool = False
    round_robin: bool = False
    """True if batch b belongs to worker b modulo `num_workers`."""
    cpus: float = 1.0
    """CPUs that affinity and quota allow."""
    throttled: bool = False
    """True if the quota has stopped this process for a while."""
    fetches_many: bool = False
    """True if the dataset returns many samples per call (`__getitems__`, `read_batch`)."""
    thread_safe: bool = False
    shards_itself: bool = True
    """False for a stream that every worker would read as a whole."""
    most_workers: int | None = None
    """Number of workers that get work: the partitions of a stream; None without a limit."""
    together: bool = False
    """True if native threads work together on each batch."""
    device: str | None = None
    can_be_sorted: bool = False
    """True if the order may be by length: that of a map-style dataset, without a sampler of the user's."""
    sampler: str = ""
    """Class name of a user's sampler; empty for feedline's own order."""
    collate_fn: str = ""
    """Name of the user's collate function; empty for default collate."""
    epoch_batches: int | None = None
    """Batches per epoch; None where unknown."""
    source: SampleSource = field(default_factory=SampleSource)
    """Library call with which the dataset reads its samples."""
    lines: tuple[LineShare, ...] = ()
    """The lines that take the time of samples; empty if they were not asked for."""
    step_threads: int = 1
    """Threads of torch's operators in the training process."""
    initializes: bool = False
    """True if workers run the user's `worker_init_fn`."""
    accelerates: bool = False
    """True if worker processes decode Pillow's JPEGs by feedline's kernels, which other pools do not."""
    sending: SendingCost | None = None
    """Cost measured with a batch of a loop whose workers are not processes; None if not measured."""
    copy_rates: CopyRates | None = None
    """Limits of memory bandwidth; None if they were not measured, as for small batches."""
    memory_left_nbytes: int | None = None
    """Memory that loop and workers may still take; None if unknown, or if the workers do not grow."""
    earlier_batches: int = 0
    """Batches of the epochs before the one of the verdict."""

    @property
    def setting(self) -> EngineSetting:
        """The arguments that decide how batches overlap."""
        method = method_of(self.pool)
        workers = 0 if method == INLINE else max(1, min(2, self.num_workers) if self.together else self.num_workers)
        return EngineSetting(workers, self.prefetch_factor, self.in_order, method, self.round_robin)

    def has(self, arguments: Mapping[str, Any]) -> bool:
        """True if there are arguments, and all of them are set already."""
        return bool(arguments) and all(getattr(self, name, None) == value for name, value in arguments.items())


def method_of(kind: PoolKind) -> str:
    """The model's name of a kind of pool."""
    if not kind.works_ahead:
        return INLINE
    return THREAD if kind.shares_rng else PROCESS


def context_of(loader: Any, builder: Any, kind: PoolKind, kind_with_workers: PoolKind, *, together: bool) -> Context:
    """The setup of a loader whose pool is of `kind`.

    `kind_with_workers` is the kind that it would have with workers.
    """
    dataset, group = loader.dataset, Cgroup.of_process()
    is_stream = isinstance(dataset, IterableDataset)
    throttling = group.throttling()
    draws = loader._fl.seed is None and builder.draws if not is_stream else True
    source = source_of(dataset)
    return Context(
        dataset=type(dataset).__name__,
        reads_by="__iter__" if is_stream else "__getitem__",
        pool=kind,
        pool_with_workers=kind_with_workers,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor or 2,
        in_order=loader.in_order,
        persistent_workers=loader.persistent_workers,
        round_robin=is_stream or (kind_with_workers.needs_pickle and draws and not loader._fl_adapts),
        cpus=available_cpus(group) if kind.cpus is None else kind.cpus(),
        throttled=throttling is not None and throttling.share > THROTTLED_SHARE,
        fetches_many=batch_getter(dataset) is not None or reader_of(dataset) is not None,
        thread_safe=traits_of(dataset).thread_safe or getattr(builder, "vectorized", False),
        shards_itself=not is_stream or loader.worker_init_fn is not None or shards_itself(dataset),
        most_workers=_most_workers(dataset),
        together=together,
        device=None if loader._fl.device is None else str(Delivery.of(loader._fl.device).device),
        can_be_sorted=not is_stream and loader.batch_size is not None and not _sampler_of(loader),
        sampler=_sampler_of(loader),
        collate_fn=_collate_fn_of(loader),
        epoch_batches=_length_of(loader),
        source=source,
        step_threads=torch.get_num_threads(),
        initializes=loader.worker_init_fn is not None,
        accelerates=bool(loader._fl.accelerate) and source.library == "PIL",
    )


def _most_workers(dataset: Any) -> int | None:
    if is_partitioned(dataset):
        return int(dataset.num_partitions)
    return getattr(dataset, "num_shards", None) if is_huggingface_stream(dataset) else None


def _sampler_of(loader: Any) -> str:
    """Class name of the user's sampler; empty for the usual ones."""
    sampler = loader.batch_sampler
    if type(sampler) is BatchSampler or sampler is None:
        sampler = getattr(loader, "sampler", None)
    plain = type(sampler) in (SequentialSampler, RandomSampler, Shuffled) or isinstance(loader.dataset, IterableDataset)
    return "" if plain or sampler is None else type(sampler).__name__


def _collate_fn_of(loader: Any) -> str:
    function = loader.collate_fn
    module = getattr(function, "__module__", None) or ""  # a method of a builtin type has None
    if function is None or function is default_collate or module.startswith("torch."):
        return ""
    return getattr(function, "__name__", type(function).__name__)


def _length_of(loader: Any) -> int | None:
    """Batches per epoch; None for a stream without a length."""
    if isinstance(loader.dataset, IterableDataset):  # asking torch for it would begin its check of the length
        return None
    with suppress(Exception):  # any error of a user's sampler: its length is then unknown
        return len(loader)
    return None
