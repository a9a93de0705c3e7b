"""Live workers of one pool: started, received from, and shut down."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from feedline.core.descriptors import Descriptors, pipe
from feedline.workers.process import channels
from feedline.workers.process.launch import ExitedProcess, Launcher, ProcessGroup, WorkerProcess
from feedline.workers.process.worker_main import HEADER, STOPPED, WorkerChannels, WorkerSetup
from feedline.workers.transport import Inbox

_STACKS_NBYTES = 1 << 16


_KILLED_S = 1.0


class WorkerHandle:
    """One worker, with the pool's ends of its channels."""

    __slots__ = ("_stacks", "answers", "inbox", "process", "stopping", "worker_id")

    def __init__(
        self, worker_id: int, process: WorkerProcess, answers: channels.Channel, stacks: Descriptors, inbox: Inbox
    ) -> None:
        self.worker_id, self.process = worker_id, process
        self.answers, self._stacks, self.inbox = answers, stacks, inbox
        self.stopping = False

    @property
    def stacks(self) -> int:
        """Descriptor of the pipe that the worker writes its stacks to."""
        return self._stacks.fd

    def close_stacks(self) -> None:
        """Close the pipe of the stacks."""
        self._stacks.close()

    def read_stacks(self) -> str:
        """Read the Python stacks written since the last call; does not wait."""
        with suppress(BlockingIOError):
            return os.read(self.stacks, _STACKS_NBYTES).decode(errors="replace")
        return ""


class WorkerAnswer(NamedTuple):
    """Answer of a worker to a task.

    The payload is for the worker's inbox, which must get every payload, in order.
    """

    member: WorkerHandle
    kind: int
    task: int
    began_ns: int
    ended_ns: int
    generators: bytes
    payload: bytes
    fds: Descriptors


class Death(NamedTuple):
    """End of a worker, reported after all of its answers.

    `task` is the task that it was building. The receiver of this event closes the inbox, because earlier answers may
    still need it.
    """

    member: WorkerHandle
    exited: ExitedProcess
    stacks: str
    task: int | None
    row: int


_SHORT_S = 0.02
"""Wait that is timed by `select`: epoll counts in whole milliseconds."""


_SELECTABLE = 1024
"""Descriptors below this number are taken by `select`."""


class WorkerSet:
    """Starts workers, receives their answers, and shuts them down.

    `members` are the live workers by id. `processes` also holds those that were alive when the set was closed.
    """

    def __init__(self, launcher: Launcher, new_inbox: Callable[[], Inbox]) -> None:
        self._launcher, self._new_inbox = launcher, new_inbox
        self._group: ProcessGroup = launcher.new_group()
        self.status = channels.StatusTable()
        self.members: dict[int, WorkerHandle] = {}
        self.processes: dict[int, WorkerProcess] = {}
        self._receive_buffer = channels.ReceiveBuffer()
        self._poll = select.epoll()
        self._by_fd: dict[int, WorkerHandle] = {}
        self._poll.register(self._group.fileno(), select.EPOLLIN)

    def start(self, setup: WorkerSetup, queue: channels.RequestQueue) -> WorkerHandle:
        """Start a worker that reads requests from `queue`."""
        # The row may still hold the task of a dead worker with this id, which would count as running, and never be
        # resubmitted.
        self.status.clear(setup.worker_id)
        answers, their_answers = channels.pair()
        stacks, their_stacks = pipe()
        os.set_blocking(stacks.fd, False)
        os.set_blocking(their_stacks.fd, False)  # a full pipe must not block the signal handler
        try:
            worker_channels = WorkerChannels(queue.fd, their_answers.fileno(), self.status.fd, their_stacks.fd)
            process = self._group.launch(setup, worker_channels)
        except BaseException:
            answers.close()
            stacks.close()
            raise
        finally:
            their_answers.close()
            their_stacks.close()
        member = WorkerHandle(setup.worker_id, process, answers, stacks, self._new_inbox())
        self.processes[setup.worker_id] = process
        self.members[setup.worker_id] = self._by_fd[answers.fileno()] = member
        self._poll.register(answers, select.EPOLLIN)
        return member

    def wait(self, timeout_s: float | None) -> list[int]:
        """Wait for events; return their descriptors, for `receive`."""
        is_short = timeout_s is not None and timeout_s < _SHORT_S and self._poll.fileno() < _SELECTABLE
        if is_short and not select.select([self._poll], [], [], timeout_s)[0]:
            return []
        return [fd for fd, _ in self._poll.poll(timeout_s)]

    def receive(self, fds: list[int]) -> list[WorkerAnswer | Death]:
        """Receive answers and deaths, in order."""
        events: list[WorkerAnswer | Death] = []
        for fd in fds:
            member = self._by_fd.get(fd)
            if member is not None:
                self._receive_one(member, events)
            elif fd == self._group.fileno():
                self._collect_deaths(events)
        if self._group.lost:
            self._collect_deaths(events)  # if another thread has noticed the loss, it was not among the descriptors
            self._renew_group()
        return events

    def kill(self, fds: list[int]) -> None:
        """Kill the workers of an interrupted `receive`, and forget dead ones."""
        for member in [self._by_fd[fd] for fd in fds if fd in self._by_fd]:
            member.stopping = True
            self._disconnect(member)
            self._group.kill(member.process)
        for member in list(self.members.values()):
            if not member.process.is_alive():
                self._forget(member)
                member.inbox.close()

    def finish(self) -> None:
        """Expect the ends of all workers. They stay members until `close`."""
        for member in list(self.members.values()):
            member.stopping = True
        self._group.finish()

    def close(self, grace_s: float) -> None:
        """Shut down every worker; kill those that still run after `grace_s` seconds.

        The queues of the workers must be closed before this call.
        """
        everyone = list(self.members.values())
        for member in self.members.values():
            self._disconnect(member)
        try:
            # Workers that are still starting have no request to finish.
            self._shut_down(grace_s if any(map(self.status.is_ready, self.members)) else 0)
        finally:  # also after an interrupt: no worker may outlive its pool
            for member in self.members.values():
                self._group.kill(member.process)
            self._shut_down(_KILLED_S)
            for member in list(self.members.values()):
                self._forget(member)
            for member in everyone:
                member.inbox.close()
            self._group.close()
            self._poll.close()
            self.status.close()

    def _receive_one(self, member: WorkerHandle, events: list[WorkerAnswer | Death]) -> bool:
        """Receive one answer; False if there is none."""
        try:
            message, fds = self._receive_buffer.receive(member.answers, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not message:
            self._disconnect(member)
            if not member.stopping:  # dead, or useless with its descriptors closed
                self._group.kill(member.process)
            return False
        kind, task, began_ns, ended_ns, states_nbytes = HEADER.unpack_from(message)
        if kind == STOPPED:
            member.stopping = True
        else:
            begin = HEADER.size + states_nbytes
            states, payload = message[HEADER.size : begin], message[begin:]
            events.append(WorkerAnswer(member, kind, task, began_ns, ended_ns, states, payload, fds))
        return True

    def _collect_deaths(self, events: list[WorkerAnswer | Death]) -> None:
        by_process = {id(member.process): member for member in self.members.values()}
        for exited in self._group.collect_exited():
            member = by_process.get(id(exited.process))
            if member is not None:
                # Answers that were sent before the death are still in the socket. They count: their requests are not
                # lost.
                while member.answers.fileno() >= 0 and self._receive_one(member, events):
                    pass
                status, worker_id = self.status, member.worker_id
                events.append(
                    Death(member, exited, member.read_stacks(), status.task(worker_id), status.row(worker_id))
                )
                self._forget(member)

    def restart(self, launcher: Launcher) -> list[WorkerAnswer | Death]:
        """Abandon all workers, and start later ones with another launcher.

        Returns their last answers and their deaths.
        """
        self._launcher = launcher
        self._group.abandon()
        return self.receive([self._group.fileno()])

    def pids(self) -> list[int]:
        """Process ids of the live workers that have started; does not wait."""
        pids = (self._group.pid_of(member.process) for member in list(self.members.values()))
        return [pid for pid in pids if pid is not None]

    @property
    def group(self) -> ProcessGroup:
        """Current process group; a lost one is replaced."""
        return self._group

    def _renew_group(self) -> None:
        self._poll.unregister(self._group.fileno())
        self._group.close()
        self._group = self._launcher.new_group()
        self._poll.register(self._group.fileno(), select.EPOLLIN)

    def _shut_down(self, grace_s: float) -> None:
        deadline = monotonic() + grace_s
        while self.members and not self._group.lost and (left_s := deadline - monotonic()) > 0:
            if self.wait(left_s):
                self._collect_deaths([])

    def _disconnect(self, member: WorkerHandle) -> None:
        if member.answers.fileno() >= 0:
            # An interrupt may have come before the member was registered.
            if self._by_fd.pop(member.answers.fileno(), None) is not None:
                with suppress(FileNotFoundError):
                    self._poll.unregister(member.answers)
            channels.disconnect(member.answers)

    def _forget(self, member: WorkerHandle) -> None:
        self._disconnect(member)
        member.close_stacks()
        del self.members[member.worker_id]
