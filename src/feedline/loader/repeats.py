"""Set-up of an epoch without workers, for the next epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter, is_
from threading import get_ident
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, MapDataPipe, RandomSampler, SequentialSampler, Subset, TensorDataset
from torch.utils.data import DataLoader as TorchDataLoader

from feedline.core.dataset import has_traits, own_attributes
from feedline.core.dataset_fingerprint import listing_fingerprint_of
from feedline.core.huggingface import is_table
from feedline.core.torch_wrappers import is_torchs, ranges_of
from feedline.loader.building.builder import BatchBuilder
from feedline.loader.building.foreign import may_be_recognized
from feedline.loader.loop import Iteration, is_iterated
from feedline.loader.plan import Plan
from feedline.loader.step_clocks import StepClocks
from feedline.samplers import Shuffled
from feedline.workers.inline import InlinePool


class EpochSetup:
    """Plan, builder and pool of one epoch, for the next one.

    An epoch of a few batches takes less time than its set-up. It is used again while everything that it was made from
    is the same: the loader's arguments, the sampler and its length, the dataset, its length and the members of its
    class. Other changes of a dataset are read with each sample, or by `BatchBuilder.follow`.
    """

    def __init__(self, loader: Any, plan: Plan, builder: BatchBuilder, pool: InlinePool) -> None:
        self.plan, self.builder, self.pool = plan, builder, pool
        self.thread = get_ident()
        """The thread that began the epoch. Another one gets its own set-up: both may iterate at once."""
        self.clocks = StepClocks(has_processes=False, works_ahead=False)
        self._inputs, self._lengths = _inputs_of(loader), _lengths_of(loader)
        self._latest: Callable[[], Iteration | None] | None = None

    @classmethod
    def of(cls, loader: Any, plan: Plan, builder: Any, pool: Any) -> EpochSetup | None:
        """The set-up of the present epoch, if it may be used again."""
        if type(pool) is not InlinePool or not isinstance(builder, BatchBuilder) or not _is_usual(loader):
            return None
        core = _core_of(loader.dataset)
        # A random key of a row, and the numbers that samples draw, come from the schedule, whatever reads the samples.
        is_known = builder.has_no_reader or (type(core) in _ARRAYS and loader._fl.seed is None)
        if not is_known or has_traits(core) or is_table(core) or may_be_recognized(core) or builder.is_stateful:
            return None
        # Both are asked for again with each epoch.
        if ranges_of(loader.dataset) is not None or listing_fingerprint_of(loader.dataset) is not None:
            return None
        if isinstance(core, MapDataPipe) or not (_has_torchs_order(type(loader)) and _order_of(loader)):
            return None
        if _lengths_of(loader) is None or not plan.workers.is_new:
            return None
        return cls(loader, plan, builder, pool)

    def fits(self, loader: Any) -> bool:
        """True if the next epoch of `loader` may begin with this set-up."""
        return (
            loader._fl_plan is self.plan  # the former epoch has begun
            and loader._fl_resume is None
            # By identity: `==` is the user's own code.
            and all(map(is_, _inputs_of(loader), self._inputs))
            and _lengths_of(loader) == self._lengths
            and not self._is_iterated(loader)
        )

    def _is_iterated(self, loader: Any) -> bool:
        """True if an iteration of the loader goes on."""
        if self._latest is None:
            return is_iterated(loader)
        latest = self._latest()
        return latest is not None and not latest.closed

    def follow(self, iteration: Iteration) -> None:
        """Record the iteration of this set-up; earlier ones are over."""
        self._latest = weakref.ref(iteration)

    def order(self) -> dict[str, Any]:
        """The sampler's order, for `restore`."""
        return {"sampler": dict(vars(self.plan.sampler)), "base_seed": self.plan.workers.base_seed}

    def restore(self, order: dict[str, Any]) -> None:
        """Take back the order of the former epoch."""
        vars(self.plan.sampler).update(order["sampler"])
        self.plan.workers.base_seed = order["base_seed"]


def _is_usual(loader: Any) -> bool:
    """True for one thread without workers, ranks, device and run log."""
    is_alone = loader._fl_world_size == 1 and loader._fl_ranks.uneven == "allow" and not loader._fl_pools.is_shared
    on_host = loader._fl.device is None and not loader.pin_memory and not loader.num_workers
    return is_alone and on_host and loader._fl_policy.action == "raise" and not loader._fl_monitor.has_log


_ARRAYS = (TensorDataset, torch.Tensor, np.ndarray)
"""Types whose reader is chosen again for each epoch."""


_arguments: Callable[[Any], tuple[Any, ...]] = attrgetter(
    "dataset", "sampler", "batch_sampler", "batch_size", "drop_last", "collate_fn", "generator", "num_workers",
    "pin_memory", "in_order", "_fl", "_fl_policy", "_fl_ranks", "_IterableDataset_len_called",
)  # fmt: skip


def _inputs_of(loader: Any) -> tuple[Any, ...]:
    """All objects from which a set-up is made."""
    core = _core_of(loader.dataset)
    kind, own = type(core), own_attributes(core)
    return (
        *_arguments(loader), vars(loader).get("worker_init_fn"), _in_group(), *_order_of(loader),
        core, *[getattr(kind, name, None) for name in _MEMBERS], *map(own.get, _MEMBERS),
    )  # fmt: skip


_MEMBERS = ("traits", "state_dict", "load_state_dict")
"""Members of a dataset that decide how it is read, besides those that `BatchBuilder.follow` looks for."""


def _order_of(loader: Any) -> tuple[Any, ...]:
    """The sampler and the batch sampler's settings; empty for unknown samplers."""
    batches, sampler = loader.batch_sampler, loader.sampler
    size: tuple[Any, ...] = ()
    if batches is not None:
        if not is_torchs(batches, BatchSampler):
            return ()
        sampler, size = batches.sampler, (batches.batch_size, batches.drop_last)
    return (sampler, *size) if type(sampler) is Shuffled or is_torchs(sampler, SequentialSampler, RandomSampler) else ()


def _has_torchs_order(kind: type) -> bool:
    """True if a class overrides none of torch's hooks for the order."""
    hooks = ("_index_sampler", "_auto_collation")
    return all(getattr(kind, hook) is getattr(TorchDataLoader, hook) for hook in hooks)


def _lengths_of(loader: Any) -> tuple[int, int] | None:
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler
    try:
        return len(loader.dataset), len(sampler)
    except Exception:  # noqa: BLE001 - the user's code may raise anything; a new set-up reports it as torch does
        return None


_in_group: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool
"""Returns True once this process is a rank of a group: a new set-up then checks who shares the samples."""


def _core_of(dataset: Any) -> Any:
    """The dataset inside torch's `Subset`."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset
