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
    """Bytes: `own` memory, shared among the tree's processes once; `mapped`, pages of the corpus's files.

    `own` is what the proportional set sizes of the tree add up to while nobody else runs the same libraries: private
    and shared memory by its proportional size, and of each library the largest resident part of any process.
    """

    own: int
    mapped: int

    def __or__(self, other: Weight) -> Weight:
        return Weight(max(self.own, other.own), max(self.mapped, other.mapped))


@dataclass(frozen=True, slots=True)
class Tree:
    """The process `pid` and all that it started."""

    pid: int

    def cpu_s(self) -> float:
        """User and system seconds so far, those of descendants that ended included."""
        return sum(_cpu_s(process) for process in self._living())

    def weight(self, corpus: Path) -> Weight:
        """The memory in use now; `corpus` is the folder whose mapped files are told apart."""
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
        """The largest weight seen until `done` is set."""
        highest = self.weight(corpus)
        while not done.wait(every_s):
            highest |= self.weight(corpus)
        return highest

    def settle(self, most_s: float = 10) -> None:
        """Wait until the tree is idle. Prefetching tells nobody when it ends, so its threads are looked at."""
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
    """Whether a thread of it runs, would like to, or waits for the disk."""
    try:
        told = [(task / "stat").read_text() for task in Path(f"/proc/{process.pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # it, or the thread, has ended meanwhile
        return True
    return any(text.rpartition(")")[2].split()[0] in "RD" for text in told)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:  # it has ended meanwhile, and its parent has its time
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def _maps(process: psutil.Process) -> list[Any]:
    try:
        return process.memory_maps(grouped=False)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it has ended meanwhile
        return []


def _is_file(path: str) -> bool:
    """Whether pages of it belong to the page cache: not memory that has a name only to be shared."""
    return path.startswith("/") and not path.startswith(("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero"))
