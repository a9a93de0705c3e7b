"""Worker processes: requests go to whoever is idle, and a death costs one request that is sent again.

Nothing runs in the background of the training process: all of this happens inside calls of the pool.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from time import monotonic
from typing import Any, Self

from feedline.core.batch import EMPTY_BATCH, BatchResult, SkippedSample
from feedline.errors import ArgumentError, WorkerDiedError, WorkerError, WorkerStalledError
from feedline.workers.base import PoolStatistics, Recovery
from feedline.workers.process import deaths, fork_server, watchdog
from feedline.workers.process.deaths import RestartBudget, poisonous
from feedline.workers.process.dispatch import PROBE, Dispatch
from feedline.workers.process.launch import Launcher, WorkerProcess
from feedline.workers.process.members import Death
from feedline.workers.process.tickets import ProcessFuture
from feedline.workers.transport import Inbox

_log = logging.getLogger("feedline")


GRACE_S = 3.0
"""How long `close` lets workers finish what they have in hand before it kills them."""


STARTING_S = 120.0
"""How long workers may take to start without it counting as waiting for a batch."""


STRIKES = 2
"""A request that has killed this many workers is given to none again as a whole."""


class ProcessPool:
    """`num_workers` processes over the builder of `launcher`, which the pool does not close.

    With `pinned` a request belongs to one worker: that of its `turn`, modulo `num_workers`. With `reports_generators` a
    worker that takes the place of a dead one continues with its random generators.
    `timeout_s` (0: none) is torch's `timeout`. Calls from several threads wait for each other.
    """

    def __init__(
        self,
        launcher: Launcher,
        num_workers: int,
        *,
        base_seed: int = 0,
        timeout_s: float = 0,
        recovery: Recovery | None = None,
        pinned: bool = False,
        reports_generators: bool = False,
        new_inbox: Callable[[], Inbox] = Inbox,
    ) -> None:
        self._builder = launcher.builder
        self._timeout_s, self._recovery = timeout_s, recovery or Recovery()
        self._casualties = RestartBudget(self._recovery)
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._opened = monotonic()
        self._tasks = count(1)
        self._poisoned: list[tuple[ProcessFuture, Death]] = []
        self._error: BaseException | None = None
        self._closed = True
        self._dispatch = Dispatch(launcher, base_seed, new_inbox, pinned=pinned, reports_generators=reports_generators)
        self._closed = False
        fork_server.close_at_exit(self)
        try:
            self.resize(num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[WorkerProcess]:
        """The worker processes, by the ids of the workers; after `close` those that there were."""
        return [process for worker, process in sorted(self._dispatch.roster.processes.items()) if worker != PROBE]

    def submit(self, request: Any) -> ProcessFuture:
        """See `WorkerPool`. The first idle worker takes it, or its partition's."""
        with self._lock:
            self._check()
            self._casualties.enter(request.epoch)
            ticket = ProcessFuture(self, next(self._tasks), request)
            self._dispatch.send(ticket)
        return ticket

    def wait_any(self, tickets: Iterable[ProcessFuture]) -> ProcessFuture:
        """See `WorkerPool`."""
        tickets = list(tickets)
        with self._lock:
            self._wait(lambda: any(ticket.settled for ticket in tickets))
        return next(ticket for ticket in tickets if ticket.settled)

    def look(self, ticket: ProcessFuture) -> bool:
        """See `Waiting`."""
        with self._lock:
            if not self._closed and self._error is None:
                self._turn(0)
        return ticket.settled

    def wait_for(self, ticket: ProcessFuture) -> None:
        """See `Waiting`."""
        with self._lock:
            self._wait(lambda: ticket.settled)

    def drop(self, ticket: ProcessFuture) -> None:
        """See `Waiting`."""
        self._dispatch.dropped.append(ticket)

    def resize(self, num_workers: int) -> None:
        """See `WorkerPool`. Workers that must go finish what they have in hand."""
        if not 0 < num_workers < PROBE:
            raise ArgumentError(f"a pool has between 1 and {PROBE - 1} worker processes; got {num_workers}")
        with self._lock:
            self._check()
            self._dispatch.resize(num_workers)

    def statistics(self) -> PoolStatistics:
        """See `WorkerPool`."""
        with self._lock:
            members = list(self._dispatch.roster.members.values())
            memory = [member.inbox.statistics() for member in members]
            return PoolStatistics(
                workers=len(members),
                in_flight=len(self._dispatch.open),
                restarts=self._casualties.restarts,
                arena_nbytes=sum(inbox.nbytes for inbox in memory),
                lent_nbytes=sum(inbox.lent_nbytes for inbox in memory),
                pids=tuple(pid for member in members if (pid := member.process.pid) is not None),
            )

    def close(self) -> None:
        """See `WorkerPool`. Workers get `GRACE_S` to finish what they have in hand."""
        if self._closed or os.getpid() != self._owner:  # in a child of the user's they are somebody else's workers
            return
        self._closed = True
        if not self._lock.acquire(timeout=GRACE_S):
            # Another thread waits for a batch that does not come. Deaths wake it, and it finds the pool closed.
            for process in self.processes:
                process.kill()
            self._lock.acquire()
        try:
            self._dispatch.close(GRACE_S)
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise WorkerError("the worker processes of this iterator have been closed")
        if os.getpid() != self._owner:
            raise WorkerError(
                f"these worker processes belong to process {self._owner}, not to {os.getpid()}, which was forked from "
                "it: iterate over the loader anew there"
            )

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._until(lambda: ready() or bool(self._poisoned))
        while not ready():
            self._narrow_down()
            self._until(lambda: ready() or bool(self._poisoned))

    def _until(self, ready: Callable[[], bool]) -> None:
        patience = watchdog.StallTimer(self._timeout_s, self._recovery.stall_s)
        while not ready():
            self._check()
            if self._turn(patience.left_s()) or self._is_starting():
                patience.heard()
            if patience.is_over():
                raise WorkerStalledError(f"DataLoader timed out after {self._timeout_s:g} seconds.\n{self._picture()}")
            if patience.wants_log():
                _log.warning("no batch for %g s.\n%s", self._recovery.stall_s, self._picture())

    def _is_starting(self) -> bool:
        """Whether no worker has come so far that it could answer, which may take a while the first time."""
        members = self._dispatch.roster.members
        return monotonic() < self._opened + STARTING_S and not any(map(self._dispatch.roster.board.ready, members))

    def _picture(self) -> str:
        work = {task: ticket.work for task, ticket in self._dispatch.open.items()}
        return watchdog.picture(self._dispatch.roster.members.values(), self._dispatch.roster.board, work)

    def _turn(self, timeout_s: float | None) -> bool:
        """Take in what is new, waiting for it; whether an answer was among it."""
        answers, dead = self._dispatch.turn(timeout_s)
        dead = [death for death in dead if not death.member.leaving]
        if dead:
            self._bury(dead)
            if self._error is None:
                self._dispatch.mend()
        return answers > 0

    def _bury(self, dead: Sequence[Death]) -> None:
        """Count, log, and note which requests have killed; the others go to other workers by themselves."""
        if (error := dead[0].ended.error) is not None:
            self._give_up(error)
            return
        self._casualties.add(dead)
        for death in dead:
            ticket = self._dispatch.open.get(death.task or 0)
            if ticket is not None and not death.ended.orphaned:
                self._strike(ticket, death)
            text = self._casualties.obituary(death, ticket and ticket.work)
            if not self._casualties.bearable:
                self._give_up(WorkerDiedError(text))
                return
            self._casualties.log(text, found=ticket is not None and ticket.strikes == STRIKES)

    def _strike(self, ticket: ProcessFuture, death: Death) -> None:
        ticket.strikes += 1
        if ticket.strikes == STRIKES:
            # Its deaths are probably its own doing, and are not held against the others until that is known.
            self._casualties.count(-STRIKES)
            del self._dispatch.open[ticket.task]
            self._poisoned.insert(0, (ticket, death))

    def _give_up(self, error: BaseException) -> None:
        self._error = error
        for ticket in [*self._dispatch.open.values(), *(ticket for ticket, _ in self._poisoned)]:
            ticket.fail(error)
        self._dispatch.open.clear()
        self._poisoned.clear()

    def _narrow_down(self) -> None:
        """Find out whether a request kills, and by which samples; leave them out, if that is the user's wish."""
        ticket, death = self._poisoned[-1]
        if not ticket.settled:
            self._judge(ticket, death)
        if (ticket, death) in self._poisoned:
            self._poisoned.remove((ticket, death))

    def _judge(self, ticket: ProcessFuture, death: Death) -> None:
        request, leaves_out = ticket.work, getattr(self._builder, "action", "raise") != "raise"
        if not self._kills(request):
            self._acquit(ticket, death)
            return
        rows = [] if request.partition is not None else self._poison(request, every=leaves_out)
        if rows and leaves_out:
            self._leave_out(ticket, rows, deaths.cause(death.ended.exitcode))
        else:
            text = self._casualties.obituary(death, request, deaths.finding(request, rows))
            ticket.fail(WorkerDiedError(text))

    def _acquit(self, ticket: ProcessFuture, death: Death) -> None:
        """It was bad luck: something else has killed the workers."""
        self._casualties.count(STRIKES)
        if self._casualties.bearable:
            ticket.strikes = 0
            self._dispatch.send(ticket)
        else:
            self._give_up(WorkerDiedError(self._casualties.obituary(death, ticket.work)))

    def _poison(self, request: Any, every: bool) -> list[int]:
        def kills(rows: Sequence[int]) -> bool:
            return self._kills(self._builder.part(request, rows))

        return poisonous(range(len(request.positions)), kills, every=every)

    def _kills(self, request: Any) -> bool:
        """Whether a worker that is given this request, and nothing else, dies of it."""
        ticket = ProcessFuture(self, next(self._tasks), request, trial=True)
        self._until(self._dispatch.try_on_probe(ticket))
        self._dispatch.open.pop(ticket.task, None)
        return not ticket.settled

    def _leave_out(self, ticket: ProcessFuture, rows: Sequence[int], how: str) -> None:
        request = ticket.work
        ticket.skipped += tuple(
            SkippedSample(
                request.epoch, int(request.positions[row]), deaths.index(request, row), f"WorkerDiedError: {how}"
            )
            for row in rows
        )
        if len(rows) == len(request.positions):
            ticket.succeed(BatchResult(EMPTY_BATCH, []))
            return
        ticket.work, ticket.strikes = self._builder.without(request, rows), 0
        ticket.task = next(self._tasks)  # no late answer to the whole request may settle it
        self._dispatch.send(ticket)
