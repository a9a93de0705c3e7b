"""Workers that do not answer: stalls, stacks, and inherited locks.

A fork copies the locks that other threads hold, but not the threads. Code in the child that needs such a lock waits for
a thread that does not exist.
"""

from __future__ import annotations

import os
import platform
import select
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

from feedline.core.proc import stat_of
from feedline.workers.process import deaths
from feedline.workers.process.channels import StatusTable
from feedline.workers.process.launch import InheritedLocks
from feedline.workers.process.members import WorkerHandle
from feedline.workers.process.worker_main import STACK_SIGNAL

_FIRST_REPLY_S = 1.0


_PAUSE_S = 0.05


CHECK_S = 0.5
"""Seconds between two checks of processes that do not answer."""


STUCK_S = 2.0
"""Seconds after which a process that nothing can wake counts as stuck."""


# Numbers of the system call. On other machines nothing compares equal, and no process counts as waiting.
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())


_PRIVATE, _COMMAND = 128, 127


_WAITS = {0, 6, 9, 11, 13}
"""FUTEX_WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2."""


class StallTimer:
    """Deadlines of one wait: when to log, when to raise.

    As with torch, `timeout_s` (0: never) counts from the arrival of any batch. `stall_s` counts from the beginning of
    the wait.
    """

    def __init__(self, timeout_s: float, stall_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        now = clock()
        self._timeout_s = timeout_s
        self._fail_at = now + timeout_s if timeout_s else float("inf")
        self._log_at = now + stall_s

    def left_s(self) -> float | None:
        """Seconds until the next deadline; None if there is none."""
        until = min(self._fail_at, self._log_at)
        return None if until == float("inf") else max(0.0, until - self._clock())

    def reset(self) -> None:
        """Restart the timeout: a batch arrived."""
        if self._timeout_s:
            self._fail_at = self._clock() + self._timeout_s

    def is_over(self) -> bool:
        """True once the timeout has passed."""
        return self._clock() >= self._fail_at

    def is_log_due(self) -> bool:
        """True for the first call after `stall_s` seconds, then False."""
        if self._clock() < self._log_at:
            return False
        self._log_at = float("inf")
        return True


def describe_workers(members: Iterable[WorkerHandle], status: StatusTable, requests: Mapping[int, Any]) -> str:
    """Describe each worker: request, current sample, duration, Python stacks.

    `requests` maps tasks to requests.
    """
    members = list(members)
    stacks = _stacks(members, status)
    return "\n".join(f"{_activity(member, status, requests)}\n{stacks[member.worker_id]}" for member in members)


def _activity(member: WorkerHandle, status: StatusTable, requests: Mapping[int, Any]) -> str:
    worker = member.worker_id
    if not status.is_ready(worker):
        return f"worker {worker} has not started yet"
    name = f"worker {worker} (pid {member.process.pid})"
    task = status.task(worker)
    if task is None:
        return f"{name} is idle"
    if task not in requests:
        return f"{name} is busy with a canceled request"
    request = requests[task]
    seconds = (monotonic_ns() - status.task_start_ns(worker)) / 1e9
    return f"{name} has been busy for {seconds:.1f} s{deaths.describe_work(request, status.row(worker))}"


def _stacks(members: list[WorkerHandle], status: StatusTable) -> dict[int, str]:
    """Python stacks of all workers by id, requested together."""
    asked = {member.stacks: member for member in members if status.is_ready(member.worker_id) and _ask(member)}
    texts = {member.worker_id: "" for member in members}
    poll = select.poll()
    for fd in asked:
        poll.register(fd, select.POLLIN)
    silent = set(asked)
    deadline = monotonic() + _FIRST_REPLY_S
    while asked:
        # A stack arrives in several writes without an end mark: a pause counts as its end.
        ready = poll.poll(1000 * (max(0.0, deadline - monotonic()) if silent else _PAUSE_S))
        if not ready:
            break
        for fd, _ in ready:
            silent.discard(fd)
            text = asked[fd].read_stacks()
            texts[asked[fd].worker_id] += text
            if not text:
                poll.unregister(fd)  # the worker has ended
    for fd in silent:
        texts[asked[fd].worker_id] = f"It does not answer ({_state(asked[fd].process.pid)})."
    return {worker_id: deaths.strip_own_frames(text) for worker_id, text in texts.items()}


def _ask(member: WorkerHandle) -> bool:
    pid = member.process.pid
    if pid is None or not member.process.is_alive():
        return False
    member.read_stacks()  # discard an earlier stack that arrived too late
    with suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
        return True
    return False


def _state(pid: int | None) -> str:
    """State of a process from the kernel, such as `T (stopped)`."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.removeprefix("State:").strip()
    return "gone"


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
        f" forked, by the forking thread or by one of these: {names}, and {_native(inherited)}."
        " Start threads after the workers, or choose multiprocessing_context='forkserver', which inherits no locks.\n"
        f"{workers}"
    )


def _native(inherited: InheritedLocks) -> str:
    number = inherited.native_threads
    return "1 native thread" if number == 1 else f"{number} native threads"


def _is_endless(call: list[str]) -> bool:
    """True if a system call waits without limit for private memory."""
    if len(call) < 5 or call[0] != _FUTEX:
        return False
    # Memory that is not private may be written by another process. A limit is a pointer: none is zero.
    operation, limit = int(call[2], 16), int(call[4], 16)
    return bool(operation & _PRIVATE) and operation & _COMMAND in _WAITS and limit == 0
