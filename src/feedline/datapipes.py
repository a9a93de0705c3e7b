"""torch's data pipes, for code that still has them: seeded and sharded as torch's own loader does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings
from torch.utils.data import dataloader as torchs


def seed(dataset: Any, generator: torch.Generator | None) -> None:
    """Seed the random parts of an iterable pipe for the next epoch, alike on all ranks and workers."""
    if not isinstance(dataset, IterDataPipe):
        return
    group = dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None
    shared = torch.Generator()
    shared.manual_seed(torchs._share_dist_seed(generator, group))  # type: ignore[no-untyped-call]
    graph_settings.apply_random_seed(dataset, shared)


def shard_inline(dataset: Any) -> None:
    """Give a pipe that is read in the training process this rank's part."""
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        graph_settings.apply_sharding(dataset, *torchs._get_distributed_settings())  # type: ignore[no-untyped-call]


def sharding_init_fn(dataset: Any, init_fn: Callable[[int], Any] | None) -> Callable[[int], Any] | None:
    """A `worker_init_fn` that gives a pipe its rank's and worker's part, then does what the user's does."""
    if not isinstance(dataset, (IterDataPipe, MapDataPipe)):
        return init_fn
    return partial(torchs._sharding_worker_init_fn, init_fn, *torchs._get_distributed_settings())  # type: ignore[no-untyped-call]
