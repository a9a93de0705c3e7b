"""CPUs available to this process, and its rank among training processes.

Affinity and the cgroup quota count, not the CPUs of the machine. The rank comes from the `distributed` argument,
torch.distributed or the launcher's environment variables.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from feedline.errors import ArgumentError

CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = CGROUP) -> int:
    """CPUs that affinity and the cgroup quota allow; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # cgroup v2 first; v1 only where the file of v2 does not exist
    quota = _quota_v2(cgroup / "cpu.max")
    if quota is None:
        quota = _quota_v1(cgroup / "cpu" / "cpu.cfs_quota_us", cgroup / "cpu" / "cpu.cfs_period_us")
    return max(1, affinity if quota is None else min(affinity, round(quota)))


def _quota_v2(path: Path) -> float | None:
    words = _words(path)
    return None if len(words) != 2 or words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(quota: Path, period: Path) -> float | None:
    quotas, periods = _words(quota), _words(period)
    return int(quotas[0]) / int(periods[0]) if quotas and periods and int(quotas[0]) > 0 else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def rank_and_world_size(distributed: Any) -> tuple[int, int]:
    """(rank, world_size) for the `distributed` argument of a DataLoader."""
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
