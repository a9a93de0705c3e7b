"""Why a worker process ended, in words, and what to do about it.

The count of dead workers against the budget, and what is said about each.

Finds the samples that kill whoever fetches them, by halving.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feedline.workers.base import Recovery
from feedline.workers.process.members import Death

CGROUPS = Path("/sys/fs/cgroup")


MEMBERSHIP = Path("/proc/self/cgroup")


_LISTED = 8


_OWN = "feedline/workers/"


_THREAD = "(most recent call first):"


_OUT_OF_MEMORY = (
    "The machine, or this job's share of it, has run out of memory: use fewer workers, a lower prefetch_factor or "
    "smaller batches, or hold less in each worker."
)


_CRASHED = "Native code has crashed: its stack, if one is given, is above; num_workers=0 under a debugger shows more."


_KILLED = "Something outside killed it: a person, a job scheduler, or a memory guard such as systemd-oomd."


_EXITED = "Code of the dataset, or of a library that it uses, has ended the process: sys.exit, os._exit, or the like."


def oom_kills(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """How many processes of our memory cgroup the kernel has killed for want of memory; 0 where it does not tell."""
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            folders, name = [cgroups / "memory" / path.strip("/"), cgroups / "memory"], "memory.oom_control"
        elif controllers == "":
            folders, name = [cgroups / path.strip("/"), cgroups], "memory.events"
        else:
            continue
        for folder in folders:  # inside a container the path may be the host's, and the root is our own group
            for entry in _lines(folder / name):
                if entry.startswith("oom_kill "):
                    return int(entry.split()[1])
    return 0


def cause(exitcode: int | None, out_of_memory: bool = False) -> str:
    """How it ended: `killed by signal SIGSEGV (Segmentation fault)`."""
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


def users_frames(stacks: str) -> str:
    """Python stacks as faulthandler writes them, without the frames that lead to the builder, and empty threads."""
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
    """The whole message; its beginning is torch's, which programs look for."""
    parts = [f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {how}{doing}."]
    if stacks:
        parts.append(f"Its last stack:\n{users_frames(stacks)}")
    if stderr.strip():
        parts.append(f"The last lines it wrote to stderr:\n{stderr.strip()}")
    parts.append(remedy)
    return "\n".join(parts)


def remedy(exitcode: int | None, out_of_memory: bool) -> str:
    """What to do about such an end."""
    if out_of_memory:
        return _OUT_OF_MEMORY
    if exitcode is None or exitcode in {-signal.SIGKILL, -signal.SIGTERM}:
        return _KILLED
    return _CRASHED if exitcode < 0 else _EXITED


def at_work_on(request: Any, row: int) -> str:
    """Which request, and which sample of it: ` while it worked on batch 3 of epoch 0 (...), at sample 17 (...)`."""
    where = f" while it worked on {request}"
    if request.partition is not None:
        return f"{where}, at its sample {row}" if row >= 0 else where
    if row < 0:
        return f"{where}, samples {_listed(request)}"
    return f"{where}, at {sample(request, row)}"


def finding(request: Any, rows: Sequence[int]) -> str:
    """What halving the request has shown: the rows that kill on their own."""
    if request.partition is not None:
        return "The request kills whoever works on it; batches of an iterable dataset cannot be taken apart further."
    if not rows:
        return "The request kills whoever works on it, but none of its samples does so alone."
    return (
        f"Taking the request apart has shown that {sample(request, rows[0])} kills a worker by itself. Repair it or "
        "remove it; on_error='skip' counts and leaves out such samples."
    )


def sample(request: Any, row: int) -> str:
    """One row of a map-style request: `sample 17 (epoch 0, position 35)`."""
    return f"sample {index(request, row)} (epoch {request.epoch}, position {request.positions[row]})"


def index(request: Any, row: int) -> Any:
    """The index at a row of a map-style request."""
    indices = request.indices.tolist() if isinstance(request.indices, np.ndarray) else request.indices
    return indices[row] if isinstance(indices, list) else indices


def _listed(request: Any) -> str:
    rows = len(request.positions)
    shown = ", ".join(str(index(request, row)) for row in range(min(rows, _LISTED)))
    return shown if rows <= _LISTED else f"{shown}, ... ({rows} in all)"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


_log = logging.getLogger("feedline")


class RestartBudget:
    """Deaths of one pool; the budget is for one epoch."""

    def __init__(self, recovery: Recovery) -> None:
        self._budget = recovery.deaths_per_epoch
        self._epoch: int | None = None
        self._count = 0
        self._oom_kills = oom_kills()
        self._starved: set[int | None] = set()
        self.restarts = 0

    def enter(self, epoch: int) -> None:
        """Requests of this epoch are being worked on."""
        if epoch != self._epoch:
            self._epoch, self._count = epoch, 0

    @property
    def bearable(self) -> bool:
        """Whether the budget allows for what has happened."""
        return self._count <= self._budget

    def add(self, dead: Sequence[Death]) -> None:
        """Count deaths that came together."""
        self.restarts += len(dead)
        self._note_out_of_memory(dead)
        # Those who died because what they were forked from was killed are one accident.
        self._count += sum(not death.ended.orphaned for death in dead) or 1

    def count(self, deaths: int) -> None:
        """Add deaths to what has happened, or take them back."""
        self._count = max(0, self._count + deaths)

    def log(self, text: str, *, found: bool) -> None:
        """Say that a worker died without harm; `found`: by a request that is known to kill now."""
        if found:
            _log.warning("%s\nIt is the second that died of this request, which is now tried by itself.", text)
        else:
            told = "%s\nAnother takes its place. Deaths in this epoch: %d of %d."
            _log.warning(told, text, self._count, self._budget)

    def obituary(self, death: Death, request: Any | None, finding: str = "") -> str:
        """All that is known about a death, the request that the worker had in hand, and what to do."""
        exitcode, pid = death.ended.exitcode, death.member.process.pid
        out_of_memory = pid in self._starved
        how = cause(exitcode, out_of_memory)
        if death.ended.orphaned:
            how = "the process that had forked it was killed"
        doing = "" if request is None else at_work_on(request, death.row)
        advice = "\n".join(filter(None, [finding, remedy(exitcode, out_of_memory)]))
        return crash_report(pid, how, doing, death.stacks, death.ended.stderr, advice)

    def _note_out_of_memory(self, dead: Sequence[Death]) -> None:
        before, self._oom_kills = self._oom_kills, oom_kills()
        if self._oom_kills > before:
            self._starved.update(death.member.process.pid for death in dead if death.ended.exitcode == -signal.SIGKILL)


def poisonous(rows: Sequence[int], kills: Callable[[Sequence[int]], bool], *, every: bool) -> list[int]:
    """The rows that kill on their own, the first one or every one; `rows` together are known to kill.

    Empty if no single row does, as when a batch kills by its size. Costs about 2 log2(len(rows)) trials per row found.
    """
    if len(rows) == 1:
        return list(rows)
    found: list[int] = []
    middle = len(rows) // 2
    for half in (rows[:middle], rows[middle:]):
        if (every or not found) and kills(half):
            found += poisonous(half, kills, every=every)
    return found
