"""Detection of processes that wait forever for a lock inherited by fork.

A fork copies the locks that other threads hold, but not the threads. Code in the child that needs such a lock waits for
a thread that does not exist.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic

from feedline.core.proc import stat_of
from feedline.workers.process.launch import InheritedLocks

CHECK_S = 0.5
"""Seconds between two checks of processes that do not answer."""


STUCK_S = 2.0
"""Seconds after which a process that nothing can wake counts as stuck."""


# Numbers of the system call. On other machines nothing compares equal, and no process counts as waiting.
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())


_PRIVATE, _COMMAND = 128, 127


_WAITS = {0, 6, 9, 11, 13}
"""FUTEX_WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2."""


class LockWatch:
    """Search for processes that no event can wake."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._due = clock() + CHECK_S
        self._since: dict[int, tuple[int, float]] = {}

    def is_due(self) -> bool:
        """True every `CHECK_S` seconds."""
        if self._clock() < self._due:
            return False
        self._due = self._clock() + CHECK_S
        return True

    def find(self, pids: Iterable[int]) -> int | None:
        """First process that has been stuck for `STUCK_S`, or None."""
        now = self._clock()
        seen = {pid: ticks for pid in pids if (ticks := ticks_if_waiting(pid)) is not None}
        # More CPU time than before means that the process has run since: another wait begins.
        self._since = {
            pid: former if (former := self._since.get(pid)) is not None and former[0] == ticks else (ticks, now)
            for pid, ticks in seen.items()
        }
        return next((pid for pid, (_, since) in self._since.items() if now - since >= STUCK_S), None)


def ticks_if_waiting(pid: int) -> int | None:
    """CPU time, in ticks, of a process that nothing can wake.

    Each of its threads waits without a time limit for memory that is not shared with other processes. None for other
    processes, and if the system does not provide this information.
    """
    folder = Path(f"/proc/{pid}")
    try:
        calls = [(task / "syscall").read_text().split() for task in (folder / "task").iterdir()]
    except OSError:
        return None
    stat = stat_of(pid)
    return None if stat is None or not calls or not all(map(_is_endless, calls)) else stat.cpu_ticks


def describe_stuck(pid: int, inherited: InheritedLocks, workers: str) -> str:
    """Describe a waiting process, and threads that may hold the lock."""
    who = "the process that forks the workers" if pid == inherited.pid else "a worker"
    names = ", ".join(map(repr, inherited.threads)) or "none of Python"
    return (
        f"{who} (pid {pid}) waits for a lock that nothing can release: it was held when the training process was"
        f" forked, by the forking thread or by one of these: {names}, and {inherited.native_threads} native threads."
        " Start threads after the workers, or choose multiprocessing_context='forkserver', which inherits no locks.\n"
        f"{workers}"
    )


def _is_endless(call: list[str]) -> bool:
    """True if a system call waits without limit for private memory."""
    if len(call) < 5 or call[0] != _FUTEX:
        return False
    # Memory that is not private may be written by another process. A limit is a pointer: none is zero.
    operation, limit = int(call[2], 16), int(call[4], 16)
    return bool(operation & _PRIVATE) and operation & _COMMAND in _WAITS and limit == 0
