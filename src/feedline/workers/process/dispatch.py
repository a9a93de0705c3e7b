"""Dispatch of requests to workers and of answers to futures."""

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
from feedline.workers.process.futures import ProcessFuture
from feedline.workers.process.launch import Launcher
from feedline.workers.process.members import Death, WorkerAnswer, WorkerHandle, WorkerSet
from feedline.workers.process.worker_main import BUILT, WorkerSetup
from feedline.workers.transport import Inbox

PROBE = MOST_WORKERS - 1
"""Id of the worker that runs one suspicious request and nothing else."""


class StepResult(NamedTuple):
    """Number of answers, and deaths, of one `Dispatch.step`."""

    answers: int
    deaths: list[Death]


class Dispatch:
    """Open requests of one pool and their queues. Not thread-safe.

    Every open request is eventually answered. After a worker dies, requests that no live worker is known to be building
    are resubmitted; a batch may therefore be built twice, and the later answer is dropped.
    """

    def __init__(self, launcher: Launcher, base_seed: int, partitions: bool, new_inbox: Callable[[], Inbox]) -> None:
        self._base_seed, self._partitions = base_seed, partitions
        self._num_workers = 0
        self.open: dict[int, ProcessFuture] = {}
        self.dropped: deque[ProcessFuture] = deque()
        self._queues: list[RequestQueue] = [] if partitions else [RequestQueue()]
        self._ready_fds: list[int] = []
        self._needs_repair = False
        self.worker_set = WorkerSet(launcher, new_inbox)

    def send(self, future: ProcessFuture) -> None:
        """Queue the request of a future. Raises what pickling the request raises."""
        self.repair()
        payload = pickle.dumps(future.work, 5)
        self.open[future.task] = future
        self._queue_of(future.work).put(future.task, payload)

    def step(self, timeout_s: float | None) -> StepResult:
        """Wait for events and settle the futures that were answered.

        Futures of dead workers stay open: unless the caller closes them, `repair` resubmits them.
        """
        self.repair()
        # An interrupt (Ctrl-C) before this list is empty again may lose an answer, and with it the order of an inbox:
        # `repair` then kills the workers of these descriptors.
        self._ready_fds = self.worker_set.wait(timeout_s)
        answers, deaths = 0, []
        for event in self.worker_set.receive(self._ready_fds) if self._ready_fds else ():
            if isinstance(event, WorkerAnswer):
                self._settle(event)
                answers += 1
            else:
                event.member.inbox.close()  # all of its answers came before and are settled
                deaths.append(event)
                self._needs_repair = True
                self.worker_set.processes.pop(event.member.worker_id, None)
        self._ready_fds = []
        for queue in self._queues:
            queue.flush()
        return StepResult(answers, deaths)

    def resize(self, num_workers: int) -> None:
        """Start workers, or stop surplus ones after their current request."""
        surplus, self._num_workers = self._num_workers - num_workers, num_workers
        if self._partitions:
            self._resize_partitions()
        else:
            for _ in range(surplus):
                self._queues[0].stop_one()
        self._needs_repair = True
        self.repair()

    def repair(self) -> None:
        """Start missing workers and resubmit lost requests.

        They are missing after deaths, cancelled futures and interrupts.
        """
        while self.dropped:
            self._needs_repair |= self.open.pop(self.dropped.popleft().task, None) is not None
        if self._ready_fds:
            self.worker_set.kill(self._ready_fds)
            self._ready_fds, self._needs_repair = [], True
        if self._needs_repair:
            self._start_missing()
            self._resubmit_lost()
            self._needs_repair = False

    def start_probe(self, future: ProcessFuture) -> Callable[[], bool]:
        """Start a worker for one future.

        Returns a function that is True once this worker has ended.
        """
        queue = RequestQueue()
        probe = self._start(PROBE, queue)
        probe.stopping = True
        self.open[future.task] = future
        queue.put(future.task, pickle.dumps(future.work, 5))
        queue.finish()
        return lambda: self.worker_set.members.get(PROBE) is not probe

    def close(self, grace_s: float) -> None:
        """Shut down every worker."""
        self.open.clear()
        for queue in self._queues:
            queue.close()
        self.worker_set.close(grace_s)

    def _settle(self, answer: WorkerAnswer) -> None:
        future = self.open.get(answer.task)
        inbox, worker_id = answer.member.inbox, answer.member.worker_id
        if future is None:
            inbox.discard(answer.payload, answer.fds)
            return
        began_ns = monotonic_ns()
        try:
            value = inbox.loads(answer.payload, answer.fds)
        except Exception as error:  # noqa: BLE001 - it is raised again by the future
            error.add_note(f"feedline: raised when {future.work}, from worker {worker_id}, was unpickled")
            future.fail(error)
        else:
            if answer.kind == BUILT:
                value.spans.append(("encode", answer.began_ns, answer.ended_ns, worker_id))
                value.spans.append(("decode", began_ns, monotonic_ns(), MAIN))
                future.succeed(value)
            else:
                future.fail(exceptions.rebuild(value, f"in DataLoader worker process {worker_id}"))
        del self.open[answer.task]

    def _start_missing(self) -> None:
        members = self.worker_set.members
        staying = sum(not member.stopping for member in members.values())
        # The worker of a partition keeps its id, so a new one waits until the old one has ended.
        numbers = range(self._num_workers) if self._partitions else count()
        for worker_id in numbers:
            if staying >= self._num_workers:
                break
            if worker_id not in members:
                self._start(worker_id, self._queues[worker_id if self._partitions else 0])
                staying += 1

    def _start(self, worker_id: int, queue: RequestQueue) -> WorkerHandle:
        return self.worker_set.start(WorkerSetup(worker_id, self._num_workers, self._base_seed), queue)

    def _resubmit_lost(self) -> None:
        """Resubmit all requests that no live worker is building, oldest first."""
        for queue in self._queues:
            queue.withdraw()
        running = {self.worker_set.status.task(worker_id) for worker_id in self.worker_set.members}
        for task, future in list(self.open.items()):
            if task not in running and not future.trial:
                self._queue_of(future.work).put(task, pickle.dumps(future.work, 5))

    def _queue_of(self, request: Any) -> RequestQueue:
        return self._queues[request.partition % len(self._queues) if self._partitions else 0]

    def _resize_partitions(self) -> None:
        while len(self._queues) < self._num_workers:
            self._queues.append(RequestQueue())
        for queue in self._queues[self._num_workers :]:
            queue.close()
        del self._queues[self._num_workers :]
        for worker_id, member in self.worker_set.members.items():
            if worker_id >= self._num_workers:
                member.stopping = True
