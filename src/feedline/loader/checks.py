"""Checks of iterable datasets: duplicate streams and wrong lengths.

The module also seeds and shards torch's data pipes, as torch's own loader does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, Subset, graph_settings
from torch.utils.data import dataloader as torchs

from feedline.core.definitions import module_of_code

DIGEST_CHARS = 16

SAME_SAMPLES = "read the same samples"
"""Words of the warning of `DuplicateStreamCheck`."""


class DuplicateStreamCheck:
    """Warns once if two partitions begin with the same samples."""

    def __init__(self, dataset_name: str) -> None:
        self._name = dataset_name
        self._seen: dict[int, str] = {}
        self._warned = False

    def add(self, partition: int, digest: str) -> None:
        """Add the digests of the samples of one delivered batch of `partition`."""
        if self._warned:
            return
        self._seen[partition] = mine = self._seen.get(partition, "") + digest
        samples = {mine[i : i + DIGEST_CHARS] for i in range(0, len(mine), DIGEST_CHARS)}
        if len(samples) > 2:  # equal constants or flags do not mean equal streams
            self._compare(partition, mine)

    def _compare(self, partition: int, mine: str) -> None:
        for other, theirs in self._seen.items():
            if other != partition and theirs == mine:
                self._warned = True
                warnings.warn(
                    f"workers {other} and {partition} {SAME_SAMPLES} from {self._name}: every sample would be "
                    "delivered once per worker. Give each worker its own part in __iter__ "
                    "(torch.utils.data.get_worker_info() gives id and num_workers), or use num_workers=0 or 1.",
                    stacklevel=4,
                )
                return


class LengthCheck:
    """Warns, as torch does, of more batches than `len(loader)` reported."""

    def __init__(self, dataset: object, length: int, num_workers: int) -> None:
        self._dataset, self._length, self._num_workers = dataset, length, num_workers
        self._yielded = 0

    def count(self) -> None:
        """Count one delivered batch, and warn if it is one too many."""
        self._yielded += 1
        if self._yielded <= self._length:
            return
        text = (
            f"Length of IterableDataset {self._dataset} was reported to be {self._length} (when accessing "
            f"len(dataloader)), but {self._yielded} samples have been fetched. "
        )
        if self._num_workers > 0:
            text += (
                "For multiprocessing data-loading, this may come from workers that all read the same samples: give "
                "each its own part in __iter__ (torch.utils.data.get_worker_info() gives id and num_workers)."
            )
        # Shown at the user's line: count, Progress.advance, and three functions of the loop lie in between.
        warnings.warn(text, stacklevel=6)


def warn_of_equal_data(dataset: Any, distributed: Any) -> None:
    """Warn once per process if all ranks read the same data.

    Only for map-style datasets in the loader's own order, and for streams with partitions: a user's sampler, or another
    stream, may already divide the data among the ranks.
    """
    ranks = _ranks() if distributed is None else 1
    if ranks == 1 or torch_worker._worker_info is not None:
        return
    has_partitions = callable(getattr(type(dataset), "partition", None)) and not _is_node_share(dataset)
    if isinstance(dataset, IterableDataset) and not has_partitions:
        return
    if not _is_share(dataset, ranks):
        remedy = (
            "distributed='auto'"
            if has_partitions
            else "distributed='auto' and a seed, or sampler=DistributedSampler(dataset),"
        )
        _warn_of_equal_data(os.getpid(), type(dataset).__name__, ranks, remedy)


_HAS_GROUPS = dist.is_available()


def _ranks() -> int:
    if _HAS_GROUPS and dist.is_initialized():
        return dist.get_world_size()
    number = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    return int(number) if number.isdecimal() else 1


def _is_node_share(dataset: Any) -> bool:
    """True for a stream that `datasets.distributed.split_dataset_by_node` has divided."""
    return getattr(getattr(dataset, "dataset", None), "_distributed", None) is not None


def _is_share(dataset: Any, ranks: int) -> bool:
    """True for a subset as large as one rank's share."""
    if not isinstance(dataset, Subset):
        return False
    with suppress(TypeError, NotImplementedError):
        return abs(len(dataset) * ranks - len(dataset.dataset)) < ranks  # type: ignore[arg-type]
    return False


@cache
def _warn_of_equal_data(_pid: int, dataset_name: str, ranks: int, remedy: str) -> None:
    warnings.warn(
        f"this is one of {ranks} ranks, and every rank reads all of {dataset_name}: give the loader {remedy} to share"
        " the samples among the ranks. If every rank should read all samples, pass distributed=(0, 1)",
        stacklevel=7,
    )


def seed_datapipe(dataset: Any, generator: torch.Generator | None) -> None:
    """Seed an iterable data pipe for an epoch, equally on all ranks."""
    if not isinstance(dataset, IterDataPipe):
        return
    group = dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None
    shared = torch.Generator()
    shared.manual_seed(torchs._share_dist_seed(generator, group))  # type: ignore[no-untyped-call]
    graph_settings.apply_random_seed(dataset, shared)


def shard_datapipe(dataset: Any) -> None:
    """Shard a data pipe by rank for reading in the training process."""
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        graph_settings.apply_sharding(dataset, *torchs._get_distributed_settings())  # type: ignore[no-untyped-call]


_SEEDERS = {
    *(("lightning", "pl_worker_init_function"), ("lightning_fabric", "pl_worker_init_function")),
    *(("transformers", "seed_worker"), ("ultralytics", "seed_worker")),
}
"""Package and name of functions that trainers pass as `worker_init_fn`, and that seed the generators only."""


def keeps_sample_seeds(init_fn: Any) -> bool:
    """True if samples may be seeded one by one after `init_fn`.

    That is so without a function, and for those of trainers that only seed the generators. Another function may have
    set the generators on purpose.
    """
    function = init_fn.func if isinstance(init_fn, partial) else init_fn
    package = (module_of_code(function) or "").partition(".")[0]
    return init_fn is None or (package, getattr(function, "__name__", "")) in _SEEDERS


def warn_of_init_fn(init_fn: Any) -> None:
    """Warn that worker threads do not call `init_fn`, unless it is MONAI's.

    MONAI's function seeds the transforms in a worker's own copy of the dataset, but threads share one dataset.
    """
    if not (module_of_code(init_fn) or "").startswith("monai."):
        warnings.warn(
            "the workers are threads of one process, which shares its dataset and random generators with them:"
            " worker_init_fn is not called. If it is needed, pass worker_method='process'",
            stacklevel=6,
        )


def sharding_init_fn(dataset: Any, init_fn: Callable[[int], Any] | None) -> Callable[[int], Any] | None:
    """A `worker_init_fn` that shards a data pipe, then calls `init_fn`.

    For other datasets, `init_fn` itself.
    """
    if not isinstance(dataset, (IterDataPipe, MapDataPipe)):
        return init_fn
    return partial(torchs._sharding_worker_init_fn, init_fn, *torchs._get_distributed_settings())  # type: ignore[no-untyped-call]
