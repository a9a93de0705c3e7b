"""`feedline doctor`: checks of the machine, with verdicts and remedies."""

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
"""File descriptors that suffice for dozens of workers."""


class Severity(enum.Enum):
    """Verdict of a finding; the value is the word that is printed."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. `remedy` is empty if nothing needs to change."""

    name: str
    value: str
    verdict: Severity = Severity.GOOD
    remedy: str = ""

    def summary(self) -> dict[str, str]:
        """The finding as a JSON object."""
        return {"name": self.name, "value": self.value, "verdict": self.verdict.value, "remedy": self.remedy}


def examine() -> list[Finding]:
    """Run all checks, in the order of the output."""
    return [
        Finding("feedline", version("feedline")),
        python(),
        Finding("torch", torch.__version__),
        kernels(),
        cpus(len(os.sched_getaffinity(0)), usable_cpus()),
        memory(),
        shared_memory(),
        available(
            "memfd", lambda: os.close(os.memfd_create("feedline-doctor")), "it carries batches between processes"
        ),
        available("pidfd", lambda: os.close(os.pidfd_open(os.getpid())), "it reports the death of a worker at once"),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        *cuda(),
    ]


def render(findings: list[Finding]) -> Table:
    """A table with one row per finding; it fits 40 columns."""
    table = Table(box=box.ROUNDED)
    table.add_column("check", overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("result", overflow="fold", ratio=1)
    for finding in findings:
        remedy = Text(f"\n→ {finding.remedy}", style="yellow") if finding.remedy else Text()
        table.add_row(finding.name, _render_verdict(finding.verdict), Text(finding.value).append_text(remedy))
    return table


def python() -> Finding:
    """Version of the interpreter, and the absence of the GIL."""
    free = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else " without a GIL"
    return Finding("python", platform.python_version() + free)


def kernels() -> Finding:
    """Presence of the compiled kernels; NumPy replaces missing ones."""
    if find_spec("feedline._native") is not None:
        return Finding("native kernels", "built")
    remedy = "same results, but slower. Install a C++ compiler, then run: pip install --force-reinstall feedline"
    return Finding("native kernels", "not built", Severity.NOTE, remedy)


def cpus(affinity: int, usable: int) -> Finding:
    """CPUs in the affinity mask, and the quota of the cgroup."""
    if usable >= affinity:
        return Finding("CPUs", f"{usable} of {os.cpu_count()}")
    remedy = f"use about {usable} workers, or raise the quota (docker run --cpus, Kubernetes limits.cpu)"
    return Finding("CPUs", f"{affinity} visible, {usable} within the cgroup's quota", Severity.NOTE, remedy)


def cgroup_memory(root: Path = CGROUP) -> int | None:
    """Memory limit of the cgroup, version 2 or 1, in bytes."""
    for file in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        if file.is_file():
            limit = file.read_text().strip()
            return None if limit == "max" or int(limit) > 1 << 60 else int(limit)
    return None


def memory() -> Finding:
    """Memory of the machine or of the container, whichever is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_memory()
    if limit is None or limit >= machine:
        return Finding("memory", _gib(machine))
    return Finding("memory", f"{_gib(limit)}, limited by the cgroup (machine: {_gib(machine)})")


def shared_memory(directory: Path = Path("/dev") / "shm") -> Finding:
    """Size of /dev/shm, which torch's loader needs and feedline does not."""
    if not directory.is_dir():
        return Finding("shared memory", "no /dev/shm; feedline does not need it")
    return Finding(
        "shared memory", f"{_gib(shutil.disk_usage(directory).total)} in {directory}; feedline does not need it"
    )


def available(name: str, use: Callable[[], object], purpose: str) -> Finding:
    """Availability of a system call.

    `use` makes the call; `purpose` says why feedline needs it.
    """
    try:
        use()
    except (AttributeError, OSError) as error:
        remedy = f"{purpose}. Needs Linux 5.3 or later, and a seccomp profile that allows it. Threads work without it"
        return Finding(name, f"not available ({error})", Severity.BAD, remedy)
    return Finding(name, "available")


def open_files(soft: int, hard: int) -> Finding:
    """Limit on the open files of one process."""
    if soft == resource.RLIM_INFINITY or soft >= FILES_NEEDED:
        return Finding("open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}")
    remedy = f"many workers and shards may need more: ulimit -n {min(hard, 65_536) if hard > 0 else 65_536}"
    return Finding("open files", f"at most {soft:,}", Severity.NOTE, remedy)


def cuda() -> Iterator[Finding]:
    """CUDA devices, one finding each."""
    if not torch.cuda.is_available():
        yield Finding("CUDA", "no device", Severity.NOTE, "batches stay on the CPU; device='cuda' raises an error")
    for i in range(torch.cuda.device_count()):
        yield Finding(f"CUDA {i}", torch.cuda.get_device_name(i))


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.0f} MiB"


def _render_verdict(verdict: Severity) -> Text:
    colors = {Severity.GOOD: "green", Severity.NOTE: "yellow", Severity.BAD: "bold red"}
    return Text(verdict.value, style=colors[verdict])
