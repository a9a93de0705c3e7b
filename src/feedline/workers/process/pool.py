"""Pool of worker processes that replaces dead workers and resubmits their requests.

The training process runs no background thread: all work happens inside calls of the pool.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any

from feedline.core.batch import EMPTY_BATCH, BatchResult, SkippedSample
from feedline.errors import ArgumentError, NotPicklableError, WorkerDiedError, WorkerStalledError
from feedline.workers.base import PoolStatistics, Recovery
from feedline.workers.process import deaths, fork_server, watchdog
from feedline.workers.process.dispatch import PROBE, Dispatch
from feedline.workers.process.futures import FuturePool, ProcessFuture
from feedline.workers.process.launch import Launcher, WorkerProcess
from feedline.workers.process.members import Death
from feedline.workers.transport import Inbox
from feedline.workers.wait_samples import ProcessSamples

_log = logging.getLogger("feedline")


GRACE_S = 3.0
"""Seconds that `close` lets workers finish their current request before it kills them."""


STARTING_S = 120.0
"""Seconds that workers have to start before the time counts as waiting for a batch."""


_STUCK_FORKS = 2
"""Number of forks with a held lock after which workers that inherit nothing are started."""


STRIKES = 2
"""Number of killed workers from which a request is not resubmitted as a whole."""


class ProcessPool(FuturePool):
    """Pool of worker processes over the builder of `launcher`.

    The pool does not close the launcher.

    The first idle worker takes the next request. With `round_robin`, a request goes to one worker: its `turn` modulo
    `num_workers`. With `reports_generators`, the replacement of a dead worker continues with its random generators.
    `timeout_s` (0: no limit) is torch's `timeout`. With `opens_late`, all workers but the first start with the first
    request. `samples` are those of earlier pools of the loader. Thread-safe: calls are serialized.
    """

    def __init__(
        self,
        launcher: Launcher,
        num_workers: int,
        *,
        base_seed: int = 0,
        timeout_s: float = 0,
        recovery: Recovery | None = None,
        round_robin: bool = False,
        reports_generators: bool = False,
        new_inbox: Callable[[], Inbox] = Inbox,
        opens_late: bool = False,
        samples: ProcessSamples | None = None,
    ) -> None:
        super().__init__("worker processes")
        self._launcher, self._builder = launcher, launcher.builder
        self._timeout_s, self._recovery = timeout_s, recovery or Recovery()
        self._opened = monotonic()
        self._poisoned: list[tuple[ProcessFuture, Death]] = []
        self._stuck_forks = 0
        self._samples = samples or ProcessSamples()
        self._dispatch = Dispatch(
            launcher, base_seed, new_inbox, round_robin=round_robin, reports_generators=reports_generators
        )
        self._budget = deaths.RestartBudget(self._recovery)
        self._closed = False
        fork_server.close_at_exit(self)
        try:
            if opens_late:
                self._dispatch.open_with(num_workers)
            else:
                self.resize(num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[WorkerProcess]:
        """Worker processes in order of id; after `close`, the last ones."""
        return [process for worker, process in sorted(self._dispatch.worker_set.processes.items()) if worker != PROBE]

    def submit(self, request: Any) -> ProcessFuture:
        """See `WorkerPool`."""
        with self._lock:
            self._check()
            self._budget.begin_epoch(request.epoch)
            future = ProcessFuture(self, next(self._tasks), request)
            self._dispatch.send(future)
            self._budget.begin()  # the worker builds while this process reads files
        return future

    def drop(self, future: ProcessFuture) -> None:
        """See `FuturePool`."""
        self._dispatch.dropped.append(future)

    def resize(self, num_workers: int) -> None:
        """See `WorkerPool`. Surplus workers finish their current request."""
        if not 0 < num_workers < PROBE:
            raise ArgumentError(f"a pool has between 1 and {PROBE - 1} worker processes; got {num_workers}")
        with self._lock:
            self._check()
            self._dispatch.resize(num_workers)

    def end_when_answered(self, before: Callable[[], object]) -> bool:
        """Let the workers end if all requests are answered.

        False if one is not. No other request may come. Calls `before` while the workers still run, and does not wait
        for their end. `statistics` and `processes` stay as they are until `close`.
        """
        # Without the lock, which another thread may hold while it waits for a batch. In a fork of this process, the
        # requests are those of its parent, whose workers must go on.
        if self._closed or os.getpid() != self._owner:
            return True
        if self._dispatch.open or self._poisoned:
            return False
        with self._lock:
            before()
            self._dispatch.finish()
        return True

    @property
    def keeps_objects(self) -> bool:
        """True if workers without a seed report dataset and `collate_fn` unchanged."""
        return self._dispatch.keeps_objects

    def statistics(self) -> PoolStatistics:
        """See `WorkerPool`.

        Waits neither for a batch nor for a worker to start.
        """
        # Without the lock, which a thread holds while it waits for a batch: each figure is right, for its own moment.
        members = list(self._dispatch.worker_set.members.values())
        memory = [member.inbox.statistics() for member in members]
        requested = [*self._dispatch.open.values(), *(future for future, _ in tuple(self._poisoned))]
        return PoolStatistics(
            workers=self._dispatch.num_workers,
            in_flight=sum(not (future.settled or future.trial) for future in requested),
            restarts=self._budget.restarts,
            arena_nbytes=sum(inbox.nbytes for inbox in memory),
            lent_nbytes=sum(inbox.lent_nbytes for inbox in memory),
            pids=tuple(self._dispatch.worker_set.pids()),
            status_fd=self._dispatch.worker_set.status.fd,
            contended_share=self._samples.contended_share,
        )

    def _close(self) -> None:
        """See `FuturePool`. Workers get `GRACE_S` to finish their current request."""
        if not self._lock.acquire(timeout=GRACE_S):
            # Another thread holds the lock and waits for a batch, or for a probe. Each death wakes it, and it finds the
            # pool closed. No limit here: what it may still do is start a process or unpickle a batch, and closing
            # descriptors under it would mix up its answers.
            for process in list(self._dispatch.worker_set.processes.values()):
                process.kill()
            self._lock.acquire()
        try:
            self._dispatch.close(GRACE_S)
        finally:
            self._lock.release()

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._until(lambda: ready() or bool(self._poisoned))
        while not ready():
            self._test_suspect()
            self._until(lambda: ready() or bool(self._poisoned))

    def _until(self, ready: Callable[[], bool]) -> None:
        timer = watchdog.StallTimer(self._timeout_s, self._recovery.stall_s)
        watch, began_s, sample_s = watchdog.LockWatch(), monotonic(), self._samples.next_s()
        while not ready():
            self._check()
            if self._step(self._limit_wait(timer.left_s(), sample_s)) or self._is_starting():
                timer.reset()
            elif monotonic() >= sample_s:
                self._samples.take(self._building(), self._dispatch.num_workers)
                sample_s = self._samples.next_s()
            self._replace_if_stuck(watch)
            if timer.is_over():
                raise WorkerStalledError(
                    f"DataLoader timed out after {self._timeout_s:g} seconds.\n{self._describe_workers()}"
                )
            if timer.is_log_due():
                _log.warning("no batch for %g s.\n%s", self._recovery.stall_s, self._describe_workers())
        self._samples.add_wait(monotonic() - began_s)

    def _limit_wait(self, timeout_s: float | None, sample_s: float) -> float | None:
        """Limit a wait to the next sample of workers, or lock check."""
        limits = [] if timeout_s is None else [timeout_s]
        if sample_s < inf:
            limits.append(max(sample_s - monotonic(), 0.0))
        if self._dispatch.worker_set.group.inherited_locks() is not None:
            limits.append(watchdog.CHECK_S)
        return min(limits, default=None)

    def _building(self) -> list[int]:
        """Process ids of the workers that are building a batch."""
        status = self._dispatch.worker_set.status
        return [
            pid
            for worker in self._dispatch.worker_set.members
            if status.task(worker) is not None and (pid := status.pid(worker))
        ]

    def _replace_if_stuck(self, watch: watchdog.LockWatch) -> None:
        """Replace workers if one of them waits for an inherited lock."""
        inherited = self._dispatch.worker_set.group.inherited_locks()
        if inherited is None or not watch.is_due():
            return
        stuck = watch.find([inherited.pid, *self._dispatch.worker_set.pids()])
        if stuck is None:
            return
        text = watchdog.describe_stuck(stuck, inherited, self._describe_workers())
        self._stuck_forks += 1
        if self._stuck_forks < _STUCK_FORKS:
            _log.warning("%s\nAll workers are forked again.", text)
            self._dispatch.restart(self._launcher)
            return
        try:
            launcher = self._launcher.without_inheritance()
        except NotPicklableError as error:
            self._fail_all(WorkerStalledError(f"{text}\nWorkers that inherit nothing cannot be started: {error}"))
            return
        _log.warning("%s\nAll workers are replaced by new ones, which inherit nothing from this process.", text)
        self._dispatch.restart(launcher)

    def _is_starting(self) -> bool:
        """True while no worker is ready and starting may take longer."""
        members = self._dispatch.worker_set.members
        return monotonic() < self._opened + STARTING_S and not any(
            map(self._dispatch.worker_set.status.is_ready, members)
        )

    def _describe_workers(self) -> str:
        work = {task: future.work for task, future in self._dispatch.open.items()}
        return watchdog.describe_workers(
            self._dispatch.worker_set.members.values(), self._dispatch.worker_set.status, work
        )

    def _step(self, timeout_s: float | None) -> bool:
        """Wait for events and handle them; True if there was an answer."""
        answers, dead = self._dispatch.step(timeout_s)
        dead = [death for death in dead if not death.member.stopping]
        if dead:
            self._handle_deaths(dead)
            if self._error is None:
                self._dispatch.repair()
        return answers > 0

    def _handle_deaths(self, dead: Sequence[Death]) -> None:
        """Count and log deaths, and set aside requests that killed several workers.

        `Dispatch.repair` resubmits the others.
        """
        if (error := dead[0].exited.error) is not None:
            self._fail_all(error)
            return
        if not self._budget.add(dead):
            return
        for death in dead:
            future = self._dispatch.open.get(death.task or 0)
            if future is not None and not death.exited.orphaned:
                self._count_strike(future, death)
            text = self._budget.describe_death(death, future and future.work)
            if self._budget.is_exceeded:
                self._fail_all(WorkerDiedError(text))
                return
            self._budget.log(text, found=future is not None and future.strikes == STRIKES)

    def _count_strike(self, future: ProcessFuture, death: Death) -> None:
        future.strikes += 1
        if future.strikes == STRIKES:
            # The request probably caused these deaths: they do not count against the budget until that is known.
            self._budget.adjust(-STRIKES)
            del self._dispatch.open[future.task]
            self._poisoned.insert(0, (future, death))

    def _fail_all(self, error: BaseException) -> None:
        self._error = error
        for future in [*self._dispatch.open.values(), *(future for future, _ in self._poisoned)]:
            future.fail(error)
        self._dispatch.open.clear()
        self._poisoned.clear()

    def _test_suspect(self) -> None:
        """Test the oldest suspicious request; fail it or leave out samples.

        `on_error` decides between the two. A request that does not kill its probe is resubmitted.
        """
        future, death = self._poisoned[-1]
        if not future.settled:
            self._resolve_poisoned(future, death)
        if (future, death) in self._poisoned:
            self._poisoned.remove((future, death))

    def _resolve_poisoned(self, future: ProcessFuture, death: Death) -> None:
        request, leaves_out = future.work, getattr(self._builder, "action", "raise") != "raise"
        if not self._kills(request):
            self._resubmit(future, death)
            return
        rows = [] if request.partition is not None else self._find_poisonous_rows(request, every=leaves_out)
        if rows and leaves_out:
            self._leave_out(future, rows, deaths.describe_exit(death.exited.exitcode))
        else:
            text = self._budget.describe_death(death, request, deaths.describe_finding(request, rows))
            future.fail(WorkerDiedError(text))

    def _resubmit(self, future: ProcessFuture, death: Death) -> None:
        """Resubmit a request that did not kill its probe."""
        self._budget.adjust(STRIKES)
        if not self._budget.is_exceeded:
            future.strikes = 0
            self._dispatch.send(future)
        else:
            self._fail_all(WorkerDiedError(self._budget.describe_death(death, future.work)))

    def _find_poisonous_rows(self, request: Any, every: bool) -> list[int]:
        def kills(rows: Sequence[int]) -> bool:
            return self._kills(self._builder.part(request, rows))

        return deaths.find_poisonous(range(len(request.positions)), kills, every=every)

    def _kills(self, request: Any) -> bool:
        """True if a worker that builds only this request dies."""
        while True:
            future = ProcessFuture(self, next(self._tasks), request, trial=True)
            # In a process of its own: the other workers keep their requests, and the death has one possible cause.
            self._until(self._dispatch.start_probe(future))
            self._dispatch.open.pop(future.task, None)
            if future.settled or not self._dispatch.probe_orphaned:
                return not future.settled

    def _leave_out(self, future: ProcessFuture, rows: Sequence[int], how: str) -> None:
        request = future.work
        future.skipped += tuple(
            SkippedSample(
                request.epoch, int(request.positions[row]), deaths.index_at(request, row), f"WorkerDiedError: {how}"
            )
            for row in rows
        )
        if len(rows) == len(request.positions):
            future.succeed(BatchResult(EMPTY_BATCH, []))
            return
        future.work, future.strikes = self._builder.without(request, rows), 0
        future.task = next(self._tasks)  # a late answer to the whole request must not settle it
        self._dispatch.send(future)
