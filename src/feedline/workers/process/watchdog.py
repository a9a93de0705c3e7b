"""Stall detection, and a report on the activity of each worker."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

from feedline.workers.process import deaths
from feedline.workers.process.channels import StatusTable
from feedline.workers.process.members import WorkerHandle
from feedline.workers.process.worker_main import STACK_SIGNAL

_FIRST_REPLY_S = 1.0


_PAUSE_S = 0.05


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
