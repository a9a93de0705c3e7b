"""The workers of one pool, as a source of answers and deaths."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from feedline.workers.process import channels
from feedline.workers.process.channels import RequestQueue, StatusTable
from feedline.workers.process.launch import ExitedProcess, Launcher, WorkerProcess
from feedline.workers.process.worker_main import HEADER, LEFT, WorkerChannels, WorkerSetup
from feedline.workers.transport import Inbox

_STACKS_NBYTES = 1 << 16


_KILLED_S = 1.0


class WorkerHandle:
    """One worker."""

    __slots__ = ("answers", "inbox", "leaving", "process", "stacks", "worker_id")

    def __init__(
        self, worker_id: int, process: WorkerProcess, answers: socket.socket, stacks: int, inbox: Inbox
    ) -> None:
        self.worker_id, self.process = worker_id, process
        self.answers, self.stacks, self.inbox = answers, stacks, inbox
        self.leaving = False

    def written(self) -> str:
        """What it has written to its pipe for stacks, since the last call."""
        with suppress(BlockingIOError):
            return os.read(self.stacks, _STACKS_NBYTES).decode(errors="replace")
        return ""


class WorkerAnswer(NamedTuple):
    """What a worker sent for a task; the payload is for its inbox, which must get every one of them in order."""

    member: WorkerHandle
    kind: int
    task: int
    began_ns: int
    ended_ns: int
    generators: bytes
    payload: bytes
    fds: tuple[int, ...]


class Death(NamedTuple):
    """A worker has ended; all of its answers came before. Its task is the one that it had in hand.

    Its inbox is open until whoever hears of this closes it: those answers may not have been looked at yet.
    """

    member: WorkerHandle
    ended: ExitedProcess
    stacks: str
    task: int | None
    row: int


class WorkerSet:
    """Starts workers, hears from them, and sees them off.

    `members` are the workers that have not ended, by id; `processes` also those that were there at the end.
    """

    def __init__(self, launcher: Launcher, new_inbox: Callable[[], Inbox]) -> None:
        self._launcher, self._new_inbox = launcher, new_inbox
        self._crew = launcher.crew()
        self.board = StatusTable()
        self.members: dict[int, WorkerHandle] = {}
        self.processes: dict[int, WorkerProcess] = {}
        self._post = channels.ReceiveBuffer()
        self._poll = select.epoll()
        self._by_fd: dict[int, WorkerHandle] = {}
        self._poll.register(self._crew.fileno(), select.EPOLLIN)

    def hire(self, setup: WorkerSetup, outlet: RequestQueue) -> WorkerHandle:
        """A new worker, which takes its requests from `outlet`."""
        self.board.clear(setup.worker_id)
        answers, their_answers = channels.pair()
        stacks, their_stacks = os.pipe()
        os.set_blocking(stacks, False)
        os.set_blocking(their_stacks, False)  # a full pipe must not stop a signal handler
        try:
            lines = WorkerChannels(outlet.fd, their_answers.fileno(), self.board.fd, their_stacks)
            process = self._crew.launch(setup, lines)
        except BaseException:
            answers.close()
            os.close(stacks)
            raise
        finally:
            their_answers.close()
            os.close(their_stacks)
        member = WorkerHandle(setup.worker_id, process, answers, stacks, self._new_inbox())
        self.processes[setup.worker_id] = process
        self.members[setup.worker_id] = self._by_fd[answers.fileno()] = member
        self._poll.register(answers, select.EPOLLIN)
        return member

    def wait(self, timeout_s: float | None) -> list[int]:
        """Wait for something to happen; what `hear` is to be called with."""
        return [fd for fd, _ in self._poll.poll(timeout_s)]

    def hear(self, fds: list[int]) -> list[WorkerAnswer | Death]:
        """What happened, in order."""
        events: list[WorkerAnswer | Death] = []
        for fd in fds:
            member = self._by_fd.get(fd)
            if member is not None:
                self._hear_one(member, events)
            elif fd == self._crew.fileno():
                self._hear_of_deaths(events)
        if self._crew.lost:
            self._renew_crew()
        return events

    def expel(self, fds: list[int]) -> None:
        """After a `hear` that was interrupted: get rid of the workers that it was about, and of the dead."""
        for member in [self._by_fd[fd] for fd in fds if fd in self._by_fd]:
            member.leaving = True
            self._hang_up(member)
            self._crew.kill(member.process)
        for member in list(self.members.values()):
            if not member.process.is_alive():
                self._forget(member)
                member.inbox.close()

    def close(self, grace_s: float) -> None:
        """See every worker off, after `grace_s` by force. Their outlets must have been closed before."""
        everyone = list(self.members.values())
        for member in self.members.values():
            self._hang_up(member)
        try:
            self._see_off(grace_s if any(map(self.board.ready, self.members)) else 0)
        finally:  # also when the wait is interrupted
            for member in self.members.values():
                self._crew.kill(member.process)
            self._see_off(_KILLED_S)
            for member in list(self.members.values()):
                self._forget(member)
            for member in everyone:
                member.inbox.close()
            self._crew.close()
            self._poll.close()
            self.board.close()

    def _hear_one(self, member: WorkerHandle, events: list[WorkerAnswer | Death]) -> bool:
        """Take one answer; False if there is none."""
        try:
            message, fds = self._post.receive(member.answers, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not message:
            self._hang_up(member)
            if not member.leaving:  # it is dead, or, with its descriptors closed, of no use
                self._crew.kill(member.process)
            return False
        kind, task, began_ns, ended_ns, states = HEADER.unpack_from(message)
        if kind == LEFT:
            member.leaving = True
        else:
            payload = HEADER.size + states
            events.append(
                WorkerAnswer(
                    member,
                    kind,
                    task,
                    began_ns,
                    ended_ns,
                    message[HEADER.size : payload],
                    message[payload:],
                    tuple(fds),
                )
            )
        return True

    def _hear_of_deaths(self, events: list[WorkerAnswer | Death]) -> None:
        by_process = {id(member.process): member for member in self.members.values()}
        for ended in self._crew.ended():
            member = by_process.get(id(ended.process))
            if member is not None:
                while member.answers.fileno() >= 0 and self._hear_one(member, events):
                    pass
                board, worker_id = self.board, member.worker_id
                events.append(Death(member, ended, member.written(), board.task(worker_id), board.row(worker_id)))
                self._forget(member)

    def _renew_crew(self) -> None:
        self._poll.unregister(self._crew.fileno())
        self._crew.close()
        self._crew = self._launcher.crew()
        self._poll.register(self._crew.fileno(), select.EPOLLIN)

    def _see_off(self, grace_s: float) -> None:
        deadline = monotonic() + grace_s
        while self.members and not self._crew.lost and (left_s := deadline - monotonic()) > 0:
            if self.wait(left_s):
                self._hear_of_deaths([])

    def _hang_up(self, member: WorkerHandle) -> None:
        if member.answers.fileno() >= 0:
            del self._by_fd[member.answers.fileno()]
            self._poll.unregister(member.answers)
            channels.hang_up(member.answers)

    def _forget(self, member: WorkerHandle) -> None:
        self._hang_up(member)
        os.close(member.stacks)
        del self.members[member.worker_id]
