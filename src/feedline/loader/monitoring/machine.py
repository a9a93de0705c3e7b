"""Figures of the machine while a loop runs.

Memory of the workers, quota, GPU, and other programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

from feedline.core import devices
from feedline.core.cgroups import Cgroup, Throttling
from feedline.core.proc import TICK_S, cpu_ticks, stat_of
from feedline.loader.monitoring.resources import resident_nbytes


class OtherPrograms:
    """CPUs that other programs use, since this was made."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        self._began_s, self._before = monotonic(), self._ticks(pids)

    def cpus(self, pids: Iterable[int]) -> float | None:
        """CPUs used by other programs, of those that this process may use.

        None if the system does not report them, or in the first `_LEAST_S`. `pids` are the workers of this process,
        which are not other programs.
        """
        elapsed_s = monotonic() - self._began_s
        if self._before is None or elapsed_s < _LEAST_S or (now := self._ticks(pids)) is None:
            return None
        return max((now - self._before) * TICK_S / elapsed_s, 0.0)

    def _ticks(self, pids: Iterable[int]) -> int | None:
        busy = cpu_ticks(self._cpus)
        if busy is None:
            return None
        own = (stat_of(pid) for pid in (os.getpid(), *pids))
        return busy.busy - sum(stat.cpu_ticks + stat.reaped_ticks for stat in own if stat is not None)


_LEAST_S = 0.3
"""Time below which ticks are too coarse."""


_PAUSE_S = 0.02
"""Longest time between two epochs that count as one loop."""


_MACHINE_S = 1.0
"""Age up to which figures of the machine are reused: each costs a system call per worker."""


@dataclass(frozen=True, slots=True)
class SystemFigures:
    """Figures from the operating system."""

    read_s: float = -1e9
    pids: tuple[int, ...] = ()
    worker_nbytes: int = 0
    throttled_share: float | None = None
    gpu_utilization: float | None = None


class MachineFigures:
    """Figures of the machine for one loader.

    Each is read only at intervals. `pids_of_all` returns the workers of all loaders of the process, which do not
    count as other programs.
    """

    def __init__(self, pids_of_all: Callable[[], list[int]]) -> None:
        self.others_cpus: float | None = None
        """CPUs that other programs use; None if unknown."""
        self._pids_of_all = pids_of_all
        self._system = SystemFigures()
        self._group: Cgroup | None = None
        self._throttling_before: Throttling | None = None
        self._others: OtherPrograms | None = None
        self._others_due_s = 0.0
        self._left_s = -1e9

    def begin(self) -> None:
        """Count throttling from here on."""
        self._group = Cgroup.of_process()
        self._throttling_before = self._group.throttling()

    def follow_loop(self) -> None:
        """Follow a new iteration; after a pause, count other programs from zero."""
        if monotonic() - self._left_s > _PAUSE_S:  # in between, they could do anything
            self._others = self.others_cpus = None
            self._others_due_s = monotonic() + _MACHINE_S

    def leave_loop(self) -> None:
        """Record that the loop was here; a pause begins now."""
        self._left_s = monotonic()

    def begin_others(self) -> None:
        """Count other programs from here on, if not begun yet."""
        if self._others is None:
            self._others = OtherPrograms(self._pids_of_all())

    def watch_others(self, *, epoch_ends: bool) -> None:
        """Update `others_cpus` if it is due.

        Call it only while the loop runs: what other programs do afterwards does not count.
        """
        now_s = monotonic()
        if self._others is None:
            self.begin_others()
        elif epoch_ends or now_s >= self._others_due_s:
            self._others_due_s = now_s + _MACHINE_S
            self.others_cpus = self._others.cpus(self._pids_of_all())

    def system(self, pids: tuple[int, ...], *, keeps: bool) -> SystemFigures:
        """The figures from the operating system; with `keeps`, the latest ones."""
        latest, now_s = self._system, monotonic()
        if keeps or (now_s - latest.read_s < _MACHINE_S and pids == latest.pids):
            return latest
        self._system = SystemFigures(
            now_s, pids, resident_nbytes(pids), self._throttled_share(), devices.gpu_utilization()
        )
        return self._system

    def _throttled_share(self) -> float | None:
        """Share of the quota's periods cut short since the first iteration."""
        if self._group is None:
            self._group = Cgroup.of_process()
        now, before = self._group.throttling(), self._throttling_before
        return None if now is None else (now if before is None else now.since(before)).share
