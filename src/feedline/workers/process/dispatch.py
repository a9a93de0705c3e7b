"""Gets every open request to a worker and every answer to its ticket, while workers come and go."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from itertools import count
from time import monotonic_ns
from typing import Any, NamedTuple

from feedline.core.telemetry import MAIN
from feedline.workers.process import exceptions
from feedline.workers.process.channels import MOST_WORKERS, RequestQueue
from feedline.workers.process.launch import Launcher
from feedline.workers.process.members import Death, WorkerAnswer, WorkerHandle, WorkerSet
from feedline.workers.process.tickets import ProcessFuture
from feedline.workers.process.worker_main import BUILT, WorkerSetup
from feedline.workers.transport import Inbox

PROBE = MOST_WORKERS - 1
"""The id of a worker that is tried on one request, and does no other work."""


class News(NamedTuple):
    """What one turn brought."""

    answers: int
    deaths: list[Death]


class Dispatch:
    """The open requests of one pool. Not thread-safe.

    A request is never given up as long as its ticket is open: whenever a worker may have taken one with it, all that
    nobody is known to work on are sent anew. One may so be built twice; the second answer finds no ticket.
    """

    def __init__(self, launcher: Launcher, base_seed: int, partitions: bool, new_inbox: Callable[[], Inbox]) -> None:
        self._base_seed, self._partitions = base_seed, partitions
        self._num_workers = 0
        self.open: dict[int, ProcessFuture] = {}
        self.dropped: deque[ProcessFuture] = deque()
        self._outlets: list[RequestQueue] = [] if partitions else [RequestQueue()]
        self._heard: list[int] = []
        self._stale = False
        self.roster = WorkerSet(launcher, new_inbox)

    def send(self, ticket: ProcessFuture) -> None:
        """Open a ticket. Raises what pickling the request raises."""
        self.mend()
        payload = pickle.dumps(ticket.work, 5)
        self.open[ticket.task] = ticket
        self._outlet(ticket.work).put(ticket.task, payload)

    def turn(self, timeout_s: float | None) -> News:
        """Wait for something to happen, and settle the tickets that were answered.

        The tickets of dead workers stay open: unless the caller closes them, `mend` sends them to others.
        """
        self.mend()
        # Until it is empty again, an interrupt may have cost an answer, and with it the order of an inbox.
        self._heard = self.roster.wait(timeout_s)
        answers, deaths = 0, []
        for event in self.roster.hear(self._heard) if self._heard else ():
            if isinstance(event, WorkerAnswer):
                self._settle(event)
                answers += 1
            else:
                event.member.inbox.close()  # its answers, which came before, are settled
                deaths.append(event)
                self._stale = True
                self.roster.processes.pop(event.member.worker_id, None)
        self._heard = []
        for outlet in self._outlets:
            outlet.flush()
        return News(answers, deaths)

    def resize(self, num_workers: int) -> None:
        """Hire, or let go after what they have in hand."""
        surplus, self._num_workers = self._num_workers - num_workers, num_workers
        if self._partitions:
            self._resize_partitions()
        else:
            for _ in range(surplus):
                self._outlets[0].leave()
        self._stale = True
        self.mend()

    def mend(self) -> None:
        """Put right what deaths, cancelled tickets and interrupts have left: hire, and send anew."""
        while self.dropped:
            self._stale |= self.open.pop(self.dropped.popleft().task, None) is not None
        if self._heard:
            self.roster.expel(self._heard)
            self._heard, self._stale = [], True
        if self._stale:
            self._hire_missing()
            self._send_anew()
            self._stale = False

    def try_on_probe(self, ticket: ProcessFuture) -> Callable[[], bool]:
        """Give a ticket to a worker of its own; the function tells whether that worker is gone."""
        outlet = RequestQueue()
        probe = self._hire(PROBE, outlet)
        probe.leaving = True
        self.open[ticket.task] = ticket
        outlet.put(ticket.task, pickle.dumps(ticket.work, 5))
        outlet.finish()
        return lambda: self.roster.members.get(PROBE) is not probe

    def close(self, grace_s: float) -> None:
        """See every worker off."""
        self.open.clear()
        for outlet in self._outlets:
            outlet.close()
        self.roster.close(grace_s)

    def _settle(self, answer: WorkerAnswer) -> None:
        ticket = self.open.get(answer.task)
        inbox, worker_id = answer.member.inbox, answer.member.worker_id
        if ticket is None:
            inbox.discard(answer.payload, answer.fds)
            return
        began_ns = monotonic_ns()
        try:
            value = inbox.loads(answer.payload, answer.fds)
        except Exception as error:  # noqa: BLE001 - it is raised again by the ticket
            error.add_note(f"feedline: raised when {ticket.work}, from worker {worker_id}, was unpickled")
            ticket.fail(error)
        else:
            if answer.kind == BUILT:
                value.spans.append(("encode", answer.began_ns, answer.ended_ns, worker_id))
                value.spans.append(("decode", began_ns, monotonic_ns(), MAIN))
                ticket.succeed(value)
            else:
                ticket.fail(exceptions.revive(value, f"in DataLoader worker process {worker_id}"))
        del self.open[answer.task]

    def _hire_missing(self) -> None:
        members = self.roster.members
        staying = sum(not member.leaving for member in members.values())
        # A partition's worker keeps its number, and so waits for one that is still on its way out.
        numbers = range(self._num_workers) if self._partitions else count()
        for worker_id in numbers:
            if staying >= self._num_workers:
                break
            if worker_id not in members:
                self._hire(worker_id, self._outlets[worker_id if self._partitions else 0])
                staying += 1

    def _hire(self, worker_id: int, outlet: RequestQueue) -> WorkerHandle:
        return self.roster.hire(WorkerSetup(worker_id, self._num_workers, self._base_seed), outlet)

    def _send_anew(self) -> None:
        """Send all requests that nobody works on, oldest first."""
        for outlet in self._outlets:
            outlet.withdraw()
        running = {self.roster.board.task(worker_id) for worker_id in self.roster.members}
        for task, ticket in list(self.open.items()):
            if task not in running and not ticket.trial:
                self._outlet(ticket.work).put(task, pickle.dumps(ticket.work, 5))

    def _outlet(self, request: Any) -> RequestQueue:
        return self._outlets[request.partition % len(self._outlets) if self._partitions else 0]

    def _resize_partitions(self) -> None:
        while len(self._outlets) < self._num_workers:
            self._outlets.append(RequestQueue())
        for outlet in self._outlets[self._num_workers :]:
            outlet.close()
        del self._outlets[self._num_workers :]
        for worker_id, member in self.roster.members.items():
            if worker_id >= self._num_workers:
                member.leaving = True
