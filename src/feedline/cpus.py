"""How many CPUs this process may really use: affinity and cgroup quota, not the machine's count."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = CGROUP) -> int:
    """CPUs that affinity and the cgroup's quota leave to this process; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
