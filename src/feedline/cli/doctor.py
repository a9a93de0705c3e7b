"""`feedline doctor`: what this machine gives a loader, judged, with a remedy where it is too little."""

from __future__ import annotations

import enum
import os
import platform
import resource
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from feedline.loader.resources import CGROUP, usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


FILES_NEEDED = 1024
"""Descriptors that a loader with dozens of workers stays well below."""


class Severity(enum.Enum):
    """How good a finding is; the value is the word that is shown."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `remedy` is empty when nothing needs to change."""

    name: str
    value: str
    verdict: Severity = Severity.GOOD
    remedy: str = ""

    def summary(self) -> dict[str, str]:
        """The finding as JSON would hold it."""
        return {"name": self.name, "value": self.value, "verdict": self.verdict.value, "remedy": self.remedy}


def examine() -> list[Finding]:
    """Everything, in the order in which it is shown."""
    return [
        Finding("feedline", version("feedline")),
        python(),
        Finding("torch", torch.__version__),
        kernels(),
        cpus(len(os.sched_getaffinity(0)), usable_cpus()),
        memory(),
        shared_memory(),
        available("memfd", lambda: os.close(os.memfd_create("feedline-doctor")), "batches cross process borders in it"),
        available("pidfd", lambda: os.close(os.pidfd_open(os.getpid())), "a worker's death is seen through it at once"),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        *cuda(),
    ]


def shown(findings: list[Finding]) -> Table:
    """One row per finding; it reads in 60 columns."""
    table = Table(box=box.ROUNDED)
    table.add_column("")
    table.add_column("found", overflow="fold", ratio=1)
    table.add_column("verdict")
    table.add_column("what to do", overflow="fold", ratio=1)
    for finding in findings:
        table.add_row(finding.name, Text(finding.value), _word(finding.verdict), Text(finding.remedy))
    return table


def python() -> Finding:
    """The interpreter; without a GIL, threads are as good as processes."""
    free = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else " without a GIL"
    return Finding("python", platform.python_version() + free)


def kernels() -> Finding:
    """Whether the compiled kernels are here, or only their NumPy forms."""
    if find_spec("feedline._native") is not None:
        return Finding("native kernels", "built")
    remedy = "results are the same, but slower: install a C++ compiler, then: pip install --force-reinstall feedline"
    return Finding("native kernels", "not built", Severity.NOTE, remedy)


def cpus(affinity: int, usable: int) -> Finding:
    """The CPUs that affinity leaves, and those that the cgroup pays for."""
    if usable >= affinity:
        return Finding("CPUs", f"{usable} of {os.cpu_count()}")
    remedy = f"use about {usable} workers, or raise the limit (docker run --cpus, Kubernetes limits.cpu)"
    return Finding("CPUs", f"{affinity} visible, {usable} paid for by the cgroup", Severity.NOTE, remedy)


def cgroup_memory(root: Path = CGROUP) -> int | None:
    """The bytes that the cgroup (version 2 or 1) allows; None without a limit."""
    for file in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        if file.is_file():
            limit = file.read_text().strip()
            return None if limit == "max" or int(limit) > 1 << 60 else int(limit)
    return None


def memory() -> Finding:
    """The memory of the machine or of the container, whichever is less; batches in flight count towards it."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_memory()
    if limit is None or limit >= machine:
        return Finding("memory", _gib(machine))
    return Finding("memory", f"{_gib(limit)}, the cgroup's limit (machine: {_gib(machine)})")


def shared_memory(directory: Path = Path("/dev") / "shm") -> Finding:
    """The size of /dev/shm, which torch's loader needs and feedline does not."""
    if not directory.is_dir():
        return Finding("shared memory", "no /dev/shm; feedline does not need it")
    return Finding(
        "shared memory", f"{_gib(shutil.disk_usage(directory).total)} in {directory}; feedline does not need it"
    )


def available(name: str, use: Callable[[], object], purpose: str) -> Finding:
    """Whether a service of the kernel answers."""
    try:
        use()
    except (AttributeError, OSError) as error:
        remedy = f"{purpose}: needs Linux 5.3 or later and a seccomp profile that allows it; threads work without"
        return Finding(name, f"not available ({error})", Severity.BAD, remedy)
    return Finding(name, "available")


def open_files(soft: int, hard: int) -> Finding:
    """The limit on file descriptors of one process."""
    if soft == resource.RLIM_INFINITY or soft >= FILES_NEEDED:
        return Finding("open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}")
    remedy = f"many workers and open shards may need more: ulimit -n {min(hard, 65_536) if hard > 0 else 65_536}"
    return Finding("open files", f"at most {soft:,}", Severity.NOTE, remedy)


def cuda() -> Iterator[Finding]:
    """Each CUDA device."""
    if not torch.cuda.is_available():
        yield Finding("CUDA", "no device", Severity.NOTE, "batches stay on the CPU; device='cuda' would be refused")
    for i in range(torch.cuda.device_count()):
        yield Finding(f"CUDA {i}", torch.cuda.get_device_name(i))


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.0f} MiB"


def _word(verdict: Severity) -> Text:
    colors = {Severity.GOOD: "green", Severity.NOTE: "yellow", Severity.BAD: "bold red"}
    return Text(verdict.value, style=colors[verdict])
