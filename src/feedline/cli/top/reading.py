"""Readings of pages and worker processes, without lock or signal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic_ns, time
from typing import Any

from feedline.core.page import FoundPage, PageReader, find_pages
from feedline.core.proc import TICK_S, stat_of
from feedline.workers.process.channels import MOST_WORKERS, StatusTable


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One worker process at one moment."""

    worker: int
    pid: int
    state: str
    """The kernel's letter: R runs, S sleeps, D waits for a disk or a file server, T is stopped."""
    cpu_s: float
    nbytes: int
    """Resident memory."""
    busy_s: float | None
    """Seconds since the worker began its batch; None if it is idle."""
    batch: int
    index: int | None


@dataclass(frozen=True, slots=True)
class LoaderReading:
    """One loader of another process at one moment."""

    pid: int
    now_ns: int
    phase_start_ns: int
    batches: int
    figures: Mapping[str, Any]
    workers: tuple[WorkerReading, ...]
    time_s: float = field(default_factory=time)
    """Time of the reading. The figures of a loop that hangs are older."""

    @property
    def waiting_s(self) -> float:
        """Seconds of the current wait; 0 if the loop does not wait."""
        return max(0.0, (self.now_ns + self.phase_start_ns) / 1e9) if self.phase_start_ns < 0 else 0.0

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the loader, equal in all its readings."""
        return self.pid, str(self.figures.get("loader"))


def read_all(pid: int | None = None) -> list[LoaderReading]:
    """Read the loaders of one process, or of all.

    Loaders of other users are visible only to root.
    """
    return [reading for page in find_pages(pid) if (reading := _read(page)) is not None]


def _read(page: FoundPage) -> LoaderReading | None:
    """A reading; None if the loader has ended, or has no figures."""
    try:
        with PageReader(page.path) as reader:
            content = reader.read()
    except (OSError, ValueError):
        return None
    if not content.figures or "problem" in content.figures:
        return None
    now_ns = monotonic_ns()
    workers = tuple(_workers(page.pid, content.figures, now_ns))
    return LoaderReading(page.pid, now_ns, content.phase_start_ns, content.batches, content.figures, workers)


def _workers(pid: int, figures: Mapping[str, Any], now_ns: int) -> Iterator[WorkerReading]:
    """Readings of a loader's live worker processes, from its status table."""
    status_fd = figures["status_fd"]
    if status_fd < 0:
        return
    try:
        status = StatusTable(os.open(f"/proc/{pid}/fd/{status_fd}", os.O_RDWR))
    except (OSError, ValueError):  # the pool has been closed
        return
    try:
        number = min(max(figures["workers"], figures["settings"]["num_workers"]), MOST_WORKERS)
        for worker in range(number):
            reading = _worker(worker, status, now_ns)
            if reading is not None:
                yield reading
    finally:
        status.close()


def _worker(worker: int, status: StatusTable, now_ns: int) -> WorkerReading | None:
    """Reading of one worker; None if it is not running."""
    pid = status.pid(worker)
    stat = stat_of(pid)
    if stat is None:
        return None
    is_busy = status.task(worker) is not None
    return WorkerReading(
        worker=worker,
        pid=pid,
        state=stat.state,
        cpu_s=stat.cpu_ticks * TICK_S,
        nbytes=stat.resident_nbytes,
        busy_s=(now_ns - status.task_start_ns(worker)) / 1e9 if is_busy else None,
        batch=status.batch_number(worker),
        index=status.sample_index(worker) if is_busy else None,
    )
