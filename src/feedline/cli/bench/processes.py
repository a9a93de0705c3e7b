"""CPU time and memory of a process tree, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> Iterator[int]:
    """The process and all processes that come from it."""
    yield pid
    for task in _list(_PROC / str(pid) / "task"):
        for child in _read(task / "children").split():
            yield from descendants(int(child))


def cpu_s(pid: int) -> float:
    """CPU seconds of the process tree, reaped children included."""
    return sum(map(_own_cpu_s, descendants(pid)))


def memory_nbytes(pid: int) -> int:
    """Memory of the process tree, shared pages counted once."""
    return sum(map(_own_memory, descendants(pid)))


def _own_cpu_s(pid: int) -> float:
    fields = _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * _TICK_S if len(fields) > 15 else 0.0  # user, system, and both of children


def _own_memory(pid: int) -> int:
    for line in _read(_PROC / str(pid) / "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _list(folder: Path) -> list[Path]:
    with suppress(OSError):  # the process has ended
        return list(folder.iterdir())
    return []


def _read(path: Path) -> str:
    with suppress(OSError):  # the process has ended, or this kernel does not show it
        return path.read_text()
    return ""
