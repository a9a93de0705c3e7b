"""Which rank this process is: said by the user, by torch.distributed, or by the launcher's environment."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from feedline.errors import ArgumentError


def rank_and_world_size(distributed: Any) -> tuple[int, int]:
    """(rank, world_size) that DataLoader's `distributed` argument means."""
    if distributed is None:
        return 0, 1
    if distributed == "auto":
        return _found()
    try:
        rank, world_size = (int(part) for part in distributed)
    except (TypeError, ValueError):
        raise ArgumentError(f"distributed must be None, 'auto' or (rank, world_size); got {distributed!r}") from None
    if not 0 <= rank < world_size:
        raise ArgumentError(f"distributed=(rank, world_size) needs 0 <= rank < world_size; got {distributed!r}")
    return rank, world_size


def _found() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return 0, 1
    if rank is None or world_size is None:
        raise ArgumentError(
            f"distributed='auto' found RANK={rank} and WORLD_SIZE={world_size} in the environment; both are needed. "
            "Start with torchrun, or pass distributed=(rank, world_size)."
        )
    return rank_and_world_size((rank, world_size))
