"""Deaths of worker processes: reasons, remedies, restart budget, and fatal samples."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from feedline.core.cgroups import Cgroup
from feedline.workers.base import Recovery
from feedline.workers.process.members import Death

_LISTED = 8


_RELATED_LOSSES = 2
"""Requests for workers that may be lost with one death: to the branch that was to fork them, and to the fork server."""


_OWN = "feedline/workers/"


_THREAD = "(most recent call first):"


_OUT_OF_MEMORY = (
    "The machine, or this job's share of it, has run out of memory: use fewer workers, a lower prefetch_factor or "
    "smaller batches, or hold less in each worker."
)


_CRASHED = "Native code has crashed: its stack, if one is given, is above; num_workers=0 under a debugger shows more."


_KILLED = "Something outside killed it: a person, a job scheduler, or a memory guard such as systemd-oomd."


_EXITED = "Code of the dataset, or of a library that it uses, has ended the process: sys.exit, os._exit, or the like."


def describe_exit(exitcode: int | None, out_of_memory: bool = False) -> str:
    """Describe an exit code: `it was killed by signal SIGSEGV (Segmentation fault)`."""
    if exitcode is None:
        return "its exit code is not known"
    if exitcode >= 0:
        return f"it exited with code {exitcode}"
    try:
        name = f"{signal.Signals(-exitcode).name} ({signal.strsignal(-exitcode)})"
    except ValueError:  # a real-time signal has no name
        name = str(-exitcode)
    by = "the kernel's out-of-memory killer with " if out_of_memory else ""
    return f"it was killed by {by}signal {name}"


def strip_own_frames(stacks: str) -> str:
    """Remove the frames below the builder, and empty threads, from faulthandler's output."""
    kept: list[str] = []
    below = False
    for line in stacks.splitlines():
        if not line.startswith("  File "):
            if kept and kept[-1].endswith(_THREAD):
                kept.pop()
            below = False
        elif _OWN in line:
            below = True
        if not below and line.strip() and not line.startswith("Extension modules:"):
            kept.append(line)
    if kept and kept[-1].endswith(_THREAD):
        kept.pop()
    return "\n".join(kept)


def crash_report(pid: int | None, how: str, doing: str, stacks: str, stderr: str, remedy: str) -> str:
    """Compose an error message that begins like torch's.

    Programs match on that beginning.
    """
    parts = [f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {how}{doing}."]
    if stacks:
        parts.append(f"Its last stack:\n{strip_own_frames(stacks)}")
    if stderr.strip():
        parts.append(f"The last lines it wrote to stderr:\n{stderr.strip()}")
    parts.append(remedy)
    return "\n".join(parts)


def remedy(exitcode: int | None, out_of_memory: bool) -> str:
    """Advice for an exit code."""
    if out_of_memory:
        return _OUT_OF_MEMORY
    if exitcode is None or exitcode in {-signal.SIGKILL, -signal.SIGTERM}:
        return _KILLED
    return _CRASHED if exitcode < 0 else _EXITED


def describe_work(request: Any, row: int) -> str:
    """Describe a request and its current sample, as a clause.

    For example ` while it worked on batch 3 of epoch 0 (...), at sample 17 (...)`.
    """
    where = f" while it worked on {request}"
    if request.partition is not None:
        return f"{where}, at its sample {row}" if row >= 0 else where
    if row < 0:
        return f"{where}, samples {_list_samples(request)}"
    return f"{where}, at {describe_sample(request, row)}"


def describe_finding(request: Any, rows: Sequence[int]) -> str:
    """Describe the result of a search for rows that kill workers."""
    if request.partition is not None:
        return "The request kills every worker that gets it; batches of an iterable dataset cannot be divided further."
    if not rows:
        return "The request kills every worker that gets it, but none of its samples does so alone."
    return (
        f"Trials with parts of the request show that {describe_sample(request, rows[0])} kills a worker by itself. "
        "Repair it or remove it; on_error='skip' counts and leaves out such samples."
    )


def describe_sample(request: Any, row: int) -> str:
    """Describe a row of a map-style request.

    For example `sample 17 (epoch 0, position 35)`.
    """
    return f"sample {index_at(request, row)} (epoch {request.epoch}, position {request.positions[row]})"


def index_at(request: Any, row: int) -> Any:
    """Dataset index at a row of a map-style request."""
    indices = request.indices.tolist() if isinstance(request.indices, np.ndarray) else request.indices
    return indices[row] if isinstance(indices, list) else indices


def _list_samples(request: Any) -> str:
    rows = len(request.positions)
    shown = ", ".join(str(index_at(request, row)) for row in range(min(rows, _LISTED)))
    return shown if rows <= _LISTED else f"{shown}, ... ({rows} in all)"


_log = logging.getLogger("feedline")


class DeathCount:
    """Deaths in the current epoch of a pool, and their limit."""

    def __init__(self, recovery: Recovery) -> None:
        self._limit = recovery.deaths_per_epoch
        self._epoch: int | None = None
        self._count = 0
        self.restarts = 0

    def begin_epoch(self, epoch: int) -> None:
        """Reset the count if this epoch is a new one."""
        if epoch != self._epoch:
            self._epoch, self._count = epoch, 0

    @property
    def is_exceeded(self) -> bool:
        """True once there were more deaths than `Recovery.deaths_per_epoch`."""
        return self._count > self._limit

    def adjust(self, deaths: int) -> None:
        """Add a number of deaths, which may be negative, to the count."""
        self._count = max(0, self._count + deaths)


class RestartBudget(DeathCount):
    """Counts the deaths of worker processes, and describes them."""

    def __init__(self, recovery: Recovery) -> None:
        super().__init__(recovery)
        self._oom_kills: int | None = None
        self._killed_by_oom: set[int | None] = set()
        self._related_losses = 0

    def begin(self) -> None:
        """Read the kernel's counter of out-of-memory kills as the baseline. Idempotent."""
        if self._oom_kills is None:
            self._oom_kills = Cgroup.of_process().oom_kills()

    def add(self, dead: Sequence[Death]) -> bool:
        """Count deaths that were reported together.

        False if they belong to a death that was counted before.
        """
        self._note_out_of_memory(dead)
        # After the end of a zygote, the next one may be requested from a process that is ending for the same reason.
        # None of its workers has run, and none counts. The limit is for machines that kill every new process.
        if self._related_losses > 0 and all(death.exited.in_vain for death in dead):
            self._related_losses -= 1
            return False
        self.restarts += len(dead)
        if any(death.exited.orphaned for death in dead):
            self._related_losses = _RELATED_LOSSES
        # Workers that died with the zygote they were forked from count as one death together.
        self._count += sum(not death.exited.orphaned for death in dead) or 1
        return True

    def log(self, text: str, *, found: bool) -> None:
        """Log a death within the budget.

        `found` is True for the second death by the same request.
        """
        if found:
            _log.warning(
                "%s\nThis request has now killed two workers. It is tried again in a process of its own.",
                text,
            )
        else:
            _log.warning(
                "%s\nA new worker takes its place. Deaths in this epoch: %d of %d allowed.",
                *(text, self._count, self._limit),
            )

    def describe_death(self, death: Death, request: Any | None, finding: str = "") -> str:
        """Compose the error message about a death.

        `request` is the request that the worker was building, None if unknown.
        """
        exitcode, pid = death.exited.exitcode, death.member.process.pid
        out_of_memory = pid in self._killed_by_oom
        how = describe_exit(exitcode, out_of_memory)
        if death.exited.orphaned:
            how = "the process that had forked it was killed"
        doing = "" if request is None else describe_work(request, death.row)
        advice = "\n".join(filter(None, [finding, remedy(exitcode, out_of_memory)]))
        return crash_report(pid, how, doing, death.stacks, death.exited.stderr, advice)

    def _note_out_of_memory(self, dead: Sequence[Death]) -> None:
        before, self._oom_kills = self._oom_kills, Cgroup.of_process().oom_kills()
        if before is not None and self._oom_kills > before:
            self._killed_by_oom.update(
                death.member.process.pid for death in dead if death.exited.exitcode == -signal.SIGKILL
            )


def find_poisonous(rows: Sequence[int], kills: Callable[[Sequence[int]], bool], *, every: bool) -> list[int]:
    """Find the first or every row that alone kills a worker.

    The batch of all `rows` must be known to kill. The result is empty if no single row kills: the size of a batch may
    be the cause. Takes about 2 log2(len(rows)) trials per row found.
    """
    if len(rows) == 1:
        return list(rows)
    found: list[int] = []
    middle = len(rows) // 2
    for half in (rows[:middle], rows[middle:]):
        if (every or not found) and kills(half):
            found += find_poisonous(half, kills, every=every)
    return found
