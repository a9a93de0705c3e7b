"""Gets every open request to a worker and every answer to its ticket, while workers come and go."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


@dataclass(slots=True)
class WorkerGenerators:
    """States of one worker's random generators: behind its last answered batch, and where its epoch began.

    A partition of an iterable dataset may be replayed from its beginning, which draws again what was drawn.
    """

    latest: bytes | None = None
    epoch_began: bytes | None = None
    epoch: int | None = None
    replays: bool = False

    @property
    def opening(self) -> bytes | None:
        """States that a successor starts from; None for those that the base seed gives."""
        return self.epoch_began if self.replays else self.latest

    def add(self, request: Any, states: bytes) -> None:
        """Take in an answer; without `states` nothing was drawn since the answer before."""
        if request.epoch != self.epoch:
            self.epoch, self.epoch_began, self.replays = request.epoch, self.latest, request.partition is not None
        self.latest = states or self.latest


class Dispatch:
    """The open requests of one pool. Not thread-safe.

    A request is never given up as long as its ticket is open: whenever a worker may have taken one with it, all that
    nobody is known to work on are sent anew. One may so be built twice; the second answer finds no ticket.
    """

    def __init__(
        self,
        launcher: Launcher,
        base_seed: int,
        new_inbox: Callable[[], Inbox],
        *,
        pinned: bool,
        reports_generators: bool,
    ) -> None:
        self._base_seed, self._pinned = base_seed, pinned
        self._generators: dict[int, WorkerGenerators] | None = {} if reports_generators else None
        self._num_workers = 0
        self.open: dict[int, ProcessFuture] = {}
        self.dropped: deque[ProcessFuture] = deque()
        self._outlets: list[RequestQueue] = [] if pinned else [RequestQueue()]
        self._heard: list[int] = []
        self._stale = self._resized = False
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
        if self._pinned:
            self._resize_pinned()
        else:
            for _ in range(surplus):
                self._outlets[0].leave()
        self._stale = self._resized = True
        self.mend()

    def mend(self) -> None:
        """Put right what deaths, cancelled tickets and interrupts have left: hire, and send anew."""
        while self.dropped:
            ticket = self.dropped.popleft()
            # Workers with generators of their own build it all the same, as torch's do: it may draw from them.
            if self._generators is None:
                self._stale |= self.open.pop(ticket.task, None) is not None
        if self._heard:
            self.roster.expel(self._heard)
            self._heard, self._stale = [], True
        if self._stale:
            hired = self._hire_missing()
            # A living worker with generators of its own must not build a request twice, as it might if what it has just
            # taken were sent again: only the queues of new workers are filled again.
            self._send_anew(range(len(self._outlets)) if self._generators is None or self._resized else hired)
            self._stale = self._resized = False

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
        if self._generators is not None and ticket is not None and worker_id != PROBE:
            self._generators[worker_id].add(ticket.work, answer.generators)
        if ticket is None or ticket.settled:  # cancelled meanwhile
            self.open.pop(answer.task, None)
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

    def _hire_missing(self) -> list[int]:
        """Start the workers that are missing; their ids."""
        hired = []
        members = self.roster.members
        staying = sum(not member.leaving for member in members.values())
        # A worker with requests of its own keeps its number, and so waits for one that is still on its way out.
        numbers = range(self._num_workers) if self._pinned else count()
        for worker_id in numbers:
            if staying >= self._num_workers:
                break
            if worker_id not in members:
                self._hire(worker_id, self._outlets[worker_id if self._pinned else 0])
                hired.append(worker_id)
                staying += 1
        return hired

    def _hire(self, worker_id: int, outlet: RequestQueue) -> WorkerHandle:
        setup = WorkerSetup(worker_id, self._num_workers, self._base_seed)
        if self._generators is not None and worker_id != PROBE:
            states = self._generators.setdefault(worker_id, WorkerGenerators())
            setup = setup._replace(
                reports_generators=True, opening_generators=states.opening, latest_generators=states.latest
            )
        return self.roster.hire(setup, outlet)

    def _send_anew(self, queues: Iterable[int]) -> None:
        """Fill these queues again with the requests that no worker is known to work on, oldest first."""
        outlets = [self._outlets[number] for number in queues]
        for outlet in outlets:
            outlet.withdraw()
        running = {self.roster.board.task(worker_id) for worker_id in self.roster.members}
        for task, ticket in list(self.open.items()):
            if task not in running and not ticket.trial and (outlet := self._outlet(ticket.work)) in outlets:
                outlet.put(task, pickle.dumps(ticket.work, 5))

    def _outlet(self, request: Any) -> RequestQueue:
        return self._outlets[request.turn % len(self._outlets) if self._pinned else 0]

    def _resize_pinned(self) -> None:
        while len(self._outlets) < self._num_workers:
            self._outlets.append(RequestQueue())
        for outlet in self._outlets[self._num_workers :]:
            outlet.close()
        del self._outlets[self._num_workers :]
        for worker_id, member in self.roster.members.items():
            if worker_id >= self._num_workers:
                member.leaving = True
