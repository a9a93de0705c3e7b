"""CPUs of processes, and the rank among training processes.

CPU counts follow affinity and the cgroup's quota, not the machine. The rank comes from the `distributed` argument,
torch.distributed or the launcher's environment variables.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from feedline.core.cgroups import Cgroup
from feedline.errors import ArgumentError


def usable_cpus(cgroup: Cgroup | None = None) -> int:
    """Whole CPUs that affinity and quota allow; at least 1."""
    quota = (cgroup or Cgroup.of_process()).cpu_quota()
    # A worker needs a whole CPU to be worth its memory: half a CPU of quota does not count.
    return max(1, affine_cpus() if quota is None else min(affine_cpus(), int(quota)))


def available_cpus(cgroup: Cgroup | None = None) -> float:
    """CPUs that affinity and quota allow, parts of a CPU included."""
    quota = (cgroup or Cgroup.of_process()).cpu_quota()
    return float(affine_cpus()) if quota is None else min(float(affine_cpus()), quota)


def affine_cpus() -> int:
    """CPUs in the affinity mask of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_and_world_size(distributed: Any) -> tuple[int, int]:
    """(rank, world_size) for the `distributed` argument of a DataLoader.

    `ArgumentError` for other values, and for "auto" if the environment has only one of the two numbers.
    """
    if distributed is None:
        return 0, 1
    if distributed == "auto":
        return _rank_from_environment()
    try:
        rank, world_size = (int(part) for part in distributed)
    except (TypeError, ValueError):
        raise ArgumentError(f"distributed must be None, 'auto' or (rank, world_size); got {distributed!r}") from None
    if not 0 <= rank < world_size:
        raise ArgumentError(f"distributed=(rank, world_size) needs 0 <= rank < world_size; got {distributed!r}")
    return rank, world_size


def _rank_from_environment() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return 0, 1
    if rank is None or world_size is None:
        raise ArgumentError(
            f"distributed='auto' found RANK={rank} and WORLD_SIZE={world_size} in the environment; both are needed. "
            "Start with torchrun, pass distributed=(rank, world_size), or make the loader when the ranks are known: "
            "with Lightning, in train_dataloader()."
        )
    return rank_and_world_size((rank, world_size))
