"""CPU time and memory of a process and all its descendants."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import perf_counter, sleep
from typing import Any

import psutil

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Weight:
    """Bytes: `own` memory of a process tree, shared pages counted once; `mapped` pages of the corpus's files.

    `own` is the sum of the proportional set sizes while no other process uses the same libraries: private and shared
    memory by its proportional size, and of each library the largest resident part in any process.
    """

    own: int
    mapped: int

    def __or__(self, other: Weight) -> Weight:
        return Weight(max(self.own, other.own), max(self.mapped, other.mapped))


@dataclass(frozen=True, slots=True)
class Tree:
    """The process `pid` and all its descendants."""

    pid: int

    def cpu_s(self) -> float:
        """User and system seconds so far, including ended descendants."""
        return sum(_cpu_s(process) for process in self._living())

    def weight(self, corpus: Path) -> Weight:
        """The memory in use now; `corpus` is the folder whose mapped files count as `mapped`."""
        own, libraries, mapped = 0, defaultdict[str, int](int), defaultdict[str, int](int)
        for process in self._living():
            resident = defaultdict[str, int](int)
            for part in _maps(process):
                if _is_file(part.path):
                    own += part.anonymous
                    resident[part.path] += part.rss - part.anonymous
                else:
                    own += part.pss
            for path, nbytes in resident.items():
                if path.startswith(f"{corpus}/"):
                    mapped[path] += nbytes
                else:
                    libraries[path] = max(libraries[path], nbytes)
        seen = sum(min(nbytes, Path(path).stat().st_size) for path, nbytes in mapped.items())
        return Weight(own + sum(libraries.values()), seen)

    def peak(self, corpus: Path, done: Event, every_s: float = 0.1) -> Weight:
        """The largest memory until `done` is set."""
        highest = self.weight(corpus)
        while not done.wait(every_s):
            highest |= self.weight(corpus)
        return highest

    def settle(self, most_s: float = 10) -> None:
        """Wait until the tree is idle.

        Prefetching does not signal its end, so the states of its threads are polled.
        """
        idle, end = 0, perf_counter() + most_s
        while idle < _LOOKS and perf_counter() < end:
            idle = 0 if any(map(_works, self._living())) else idle + 1
            sleep(_LOOK_S)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def _living(self) -> list[psutil.Process]:
        return [psutil.Process(self.pid), *(child for child in self.descendants() if child.is_running())]


_LOOKS, _LOOK_S = 3, 0.02
"""A thread that waits for another one's work is idle for an instant; three looks in a row find it at work."""


def _works(process: psutil.Process) -> bool:
    """True if a thread of the process runs, is runnable, or waits for the disk."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{process.pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # the process or the thread has ended
        return True
    return any(text.rpartition(")")[2].split()[0] in "RD" for text in stats)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:  # it has ended, and its parent counts its time
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def _maps(process: psutil.Process) -> list[Any]:
    try:
        return process.memory_maps(grouped=False)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it has ended
        return []


def _is_file(path: str) -> bool:
    """True for pages of the page cache, false for shared memory that only has a name."""
    return path.startswith("/") and not path.startswith(("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero"))
