"""What the workers are doing when no batch comes: for the log after a while, for the error after `timeout`."""

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

_FIRST_WORD_S = 1.0


_PAUSE_S = 0.05


class StallTimer:
    """One wait for a batch: when to log that it is long, and when to give up.

    As with torch, `timeout_s` (0: never) counts from the last batch that arrived, whichever it was; `stall_s` counts
    from the beginning of the wait.
    """

    def __init__(self, timeout_s: float, stall_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        now = clock()
        self._timeout_s = timeout_s
        self._give_up = now + timeout_s if timeout_s else float("inf")
        self._log = now + stall_s

    def left_s(self) -> float | None:
        """How long to wait until there is something to do; None for ever."""
        until = min(self._give_up, self._log)
        return None if until == float("inf") else max(0.0, until - self._clock())

    def heard(self) -> None:
        """A batch arrived."""
        if self._timeout_s:
            self._give_up = self._clock() + self._timeout_s

    def is_over(self) -> bool:
        """Whether to give up."""
        return self._clock() >= self._give_up

    def wants_log(self) -> bool:
        """Whether to log; true once."""
        if self._clock() < self._log:
            return False
        self._log = float("inf")
        return True


def picture(members: Iterable[WorkerHandle], board: StatusTable, requests: Mapping[int, Any]) -> str:
    """For each worker its task, its current sample, since when, and its Python stacks. `requests` by task."""
    members = list(members)
    stacks = _stacks(members, board)
    return "\n".join(f"{_activity(member, board, requests)}\n{stacks[member.worker_id]}" for member in members)


def _activity(member: WorkerHandle, board: StatusTable, requests: Mapping[int, Any]) -> str:
    worker = member.worker_id
    if not board.ready(worker):
        return f"worker {worker} has not started yet"
    name = f"worker {worker} (pid {member.process.pid})"
    task = board.task(worker)
    if task is None:
        return f"{name} is idle"
    if task not in requests:
        return f"{name} is busy with a cancelled request"
    request = requests[task]
    seconds = (monotonic_ns() - board.since_ns(worker)) / 1e9
    return f"{name} has been busy for {seconds:.1f} s{deaths.at_work_on(request, board.row(worker))}"


def _stacks(members: list[WorkerHandle], board: StatusTable) -> dict[int, str]:
    """What each worker writes when it is asked for its stacks; asked all at once."""
    asked = {member.stacks: member for member in members if board.ready(member.worker_id) and _ask(member)}
    texts = {member.worker_id: "" for member in members}
    poll = select.poll()
    for fd in asked:
        poll.register(fd, select.POLLIN)
    silent = set(asked)
    deadline = monotonic() + _FIRST_WORD_S
    while asked:
        # A stack comes in several writes and says nothing at its end: a pause is its end.
        ready = poll.poll(1000 * (max(0.0, deadline - monotonic()) if silent else _PAUSE_S))
        if not ready:
            break
        for fd, _ in ready:
            silent.discard(fd)
            text = asked[fd].written()
            texts[asked[fd].worker_id] += text
            if not text:
                poll.unregister(fd)  # it has ended
    for fd in silent:
        texts[asked[fd].worker_id] = f"It does not answer ({_state(asked[fd].process.pid)})."
    return {worker_id: deaths.users_frames(text) for worker_id, text in texts.items()}


def _ask(member: WorkerHandle) -> bool:
    pid = member.process.pid
    if pid is None or not member.process.is_alive():
        return False
    member.written()  # an earlier stack, for which nobody waited long enough
    with suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
        return True
    return False


def _state(pid: int | None) -> str:
    """The state of a process as the kernel gives it, such as `T (stopped)`."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.removeprefix("State:").strip()
    return "gone"
