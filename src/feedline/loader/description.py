"""Description of a loader's setup, for its verdict."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, default_collate

from feedline.collate.batch_reads import reader_of
from feedline.core.cgroups import Cgroup
from feedline.core.dataset import many_at_once, traits_of
from feedline.loader.device import Delivery
from feedline.loader.partitions import PartitionedDataset
from feedline.loader.report.context import Context
from feedline.loader.report.sources import shares_itself_out, source_of
from feedline.loader.resources import available_cpus
from feedline.samplers import Shuffled
from feedline.workers.base import PoolKind

THROTTLED = 0.05
"""Share of the quota's periods that were cut short, from which a job counts as throttled."""


def describe(loader: Any, builder: Any, kind: PoolKind, kind_with_workers: PoolKind, *, together: bool) -> Context:
    """The setup of a loader whose pool is of `kind`.

    `kind_with_workers` is the kind that it would have with workers.
    """
    dataset, group = loader.dataset, Cgroup.of_process()
    is_stream = isinstance(dataset, IterableDataset)
    throttling = group.throttling()
    draws = loader.seed is None and builder.draws if not is_stream else True
    return Context(
        dataset=type(dataset).__name__,
        pool=kind,
        pool_with_workers=kind_with_workers,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor or 2,
        in_order=loader.in_order,
        persistent_workers=loader.persistent_workers,
        pinned=is_stream or (kind_with_workers.needs_pickle and draws and not loader._adapts),
        cpus=available_cpus(group),
        throttled=throttling is not None and throttling.share > THROTTLED,
        many_at_once=many_at_once(dataset) is not None or reader_of(dataset) is not None,
        thread_safe=traits_of(dataset).thread_safe or getattr(builder, "vectorized", False),
        shares_itself_out=not is_stream or loader.worker_init_fn is not None or shares_itself_out(dataset),
        most_workers=dataset.num_partitions if isinstance(dataset, PartitionedDataset) else None,
        together=together,
        device=None if loader.device is None else str(Delivery.of(loader.device).device),
        sampler=_sampler_of(loader),
        collate_fn=_collate_fn_of(loader),
        epoch_batches=_length_of(loader),
        source=source_of(dataset),
    )


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
    if function in (None, default_collate) or module.startswith("torch."):
        return ""
    return getattr(function, "__name__", type(function).__name__)


def _length_of(loader: Any) -> int | None:
    """Batches per epoch; None for a stream without a length."""
    if isinstance(loader.dataset, IterableDataset):  # asking torch for it would begin its check of the length
        return None
    with suppress(Exception):  # any error of a user's sampler: its length is then unknown
        return len(loader)
    return None
