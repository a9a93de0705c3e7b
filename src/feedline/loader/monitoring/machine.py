"""Figures of the machine while a loop runs.

Memory of the workers, quota, GPU, and other programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

import torch

from feedline.core import devices
from feedline.core.cgroups import Cgroup, Throttling
from feedline.core.devices import Device
from feedline.core.proc import TICK_S, ProcessStat, cpu_ticks, stat_of
from feedline.loader.device.delivery import Delivery


class OtherPrograms:
    """CPUs that other programs use, since this was made."""

    def __init__(self, workers: Iterable[ProcessStat]) -> None:
        self._cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        self._began_s, self._before = monotonic(), self._ticks(workers)

    def cpus(self, workers: Iterable[ProcessStat]) -> float | None:
        """CPUs used by other programs, of those that this process may use.

        None if the system does not report them, or in the first `_LEAST_S`. The workers of this process are not other
        programs.
        """
        elapsed_s = monotonic() - self._began_s
        if self._before is None or elapsed_s < _LEAST_S or (now := self._ticks(workers)) is None:
            return None
        return max((now - self._before) * TICK_S / elapsed_s, 0.0)

    def _ticks(self, workers: Iterable[ProcessStat]) -> int | None:
        busy = cpu_ticks(self._cpus)
        if busy is None:
            return None
        own = (stat_of(os.getpid()), *workers)
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


class _GroupCounters:
    """Throttling of the process's control group, for all its loaders.

    A script that makes a loader per epoch would read several files for each of them.
    """

    def __init__(self) -> None:
        self._latest: tuple[float, int, Throttling | None] = (-1e9, 0, None)

    def within(self, age_s: float) -> Throttling | None:
        """The counters, read at most `age_s` ago in this process."""
        read_s, pid, counters = self._latest
        now_s = monotonic()
        if pid != os.getpid() or now_s - read_s >= age_s:
            counters = Cgroup.of_process().throttling()
            self._latest = now_s, os.getpid(), counters  # in one step: threads read it
        return counters


_counters = _GroupCounters()


class MachineFigures:
    """Figures of the machine for one loader.

    Each is read only at intervals. `all_workers` returns the workers of all loaders of the process, which do not
    count as other programs.
    """

    def __init__(self, all_workers: Callable[[], list[ProcessStat]]) -> None:
        self.others_cpus: float | None = None
        """CPUs that other programs use; None if unknown."""
        self._all_workers = all_workers
        self._kept: dict[int, ProcessStat | None] = {}
        self._system = SystemFigures()
        self._throttling_before: Throttling | None = None
        self._others: OtherPrograms | None = None
        self._others_due_s = 0.0
        self._left_s = -1e9
        self._gpu: torch.device | None = None

    def begin(self) -> None:
        """Count throttling from here on."""
        self._throttling_before = _counters.within(_MACHINE_S)

    def follow_loop(self, device: Device | Delivery | None) -> None:
        """Follow a new iteration, which has batches on `device`.

        Called by the thread of the loop. After a pause, other programs are counted from zero.
        """
        self.forget_workers()
        place = device.device if isinstance(device, Delivery) else device
        there = None if place is None else torch.device(place)
        self._gpu = devices.gpu_of(there)  # here: other threads have a current device of their own
        if monotonic() - self._left_s > _PAUSE_S:  # in between, they could do anything
            self._others = self.others_cpus = None
            self._others_due_s = monotonic() + _MACHINE_S

    def leave_loop(self) -> None:
        """Record that the loop was here; a pause begins now."""
        self._left_s = monotonic()

    def begin_others(self) -> None:
        """Count other programs from here on, if not begun yet."""
        if self._others is None:
            self._others = OtherPrograms(self._all_workers())

    def watch_others(self, *, epoch_ends: bool) -> None:
        """Update `others_cpus` if it is due.

        Call it only while the loop runs: what other programs do afterwards does not count.
        """
        now_s = monotonic()
        if self._others is None:
            self.begin_others()
        elif epoch_ends or now_s >= self._others_due_s:
            self._others_due_s = now_s + _MACHINE_S
            self.others_cpus = self._others.cpus(self._all_workers())

    def keep_workers(self, pids: Iterable[int]) -> None:
        """Read the workers for the last time in this epoch.

        They may end before it does. Until they are reaped, their times are nowhere else.
        """
        self._kept = {pid: stat_of(pid) for pid in pids}

    @property
    def keeps_workers(self) -> bool:
        """True from `keep_workers` on, until `forget_workers`."""
        return bool(self._kept)

    def forget_workers(self) -> None:
        """Read workers again: the epoch is over."""
        self._kept = {}

    def workers(self, pids: Iterable[int]) -> list[ProcessStat]:
        """The figures of workers: those that are kept, or current ones."""
        kept = self._kept
        stats = (kept[pid] if pid in kept else stat_of(pid) for pid in pids)
        return [stat for stat in stats if stat is not None]

    def resident_nbytes(self, pids: Iterable[int]) -> int:
        """Resident memory of workers in bytes, shared pages included."""
        return sum(stat.resident_nbytes for stat in self.workers(pids))

    def system(self, pids: tuple[int, ...], *, keeps: bool, is_over: bool = False) -> SystemFigures:
        """The figures from the operating system; with `keeps`, the latest ones.

        If the epoch `is_over`, the use of the GPU is the latest one known: an idle GPU says nothing about the loop.
        """
        latest, now_s = self._system, monotonic()
        if keeps or (now_s - latest.read_s < _MACHINE_S and pids == latest.pids):
            return latest
        gpu = latest.gpu_utilization if is_over else None
        gpu = devices.gpu_utilization(self._gpu) if gpu is None else gpu
        self._system = SystemFigures(now_s, pids, self.resident_nbytes(pids), self._throttled_share(), gpu)
        return self._system

    def _throttled_share(self) -> float | None:
        """Share of the quota's periods cut short since the first iteration."""
        now, before = _counters.within(0.0), self._throttling_before
        return None if now is None else (now if before is None else now.since(before)).share
