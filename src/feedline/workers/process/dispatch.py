"""Dispatch of requests to workers and of answers to futures."""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from time import monotonic_ns
from typing import Any, NamedTuple

from feedline.core.schedule import epoch_of
from feedline.core.telemetry import MAIN
from feedline.workers.object_changes import lost_changes, unpack_changes
from feedline.workers.process import exceptions
from feedline.workers.process.channels import MOST_WORKERS, RequestQueue
from feedline.workers.process.futures import ProcessFuture
from feedline.workers.process.launch import Launcher
from feedline.workers.process.members import Death, WorkerAnswer, WorkerHandle, WorkerSet
from feedline.workers.process.worker_main import BUILT, PartitionReplay, WorkerSetup
from feedline.workers.transport import Inbox

_log = logging.getLogger("feedline")


PROBE = MOST_WORKERS - 1
"""Id of the worker that runs one suspicious request and nothing else."""


class StepResult(NamedTuple):
    """Number of answers, and deaths, of one `Dispatch.step`."""

    answers: int
    deaths: list[Death]


@dataclass(slots=True)
class WorkerGenerators:
    """Recorded states of one worker's random generators, and changes of its dataset.

    The states after its last answer are kept, and those at the start of its epoch: a replacement may have to replay a
    partition from its beginning, with all its draws.
    """

    latest: bytes | None = None
    epoch_start: bytes | None = None
    objects: bytes = b""
    objects_at_start: bytes = b""
    epoch: tuple[int, int] | None = None
    replays: bool = False

    @property
    def initial_generators(self) -> bytes | None:
        """Generator states that a replacement starts from; None for `base_seed`."""
        return self.epoch_start if self.replays else self.latest

    def initial_objects(self, worker_id: int) -> bytes:
        """Object changes that a replacement starts from; logs those that are lost.

        Empty if it replays a partition, because the replay holds the changes.
        """
        if lost := lost_changes(self.objects):
            _log.warning(
                "the replacement of worker %d starts without changes that the dead one made to %s: if batches depend "
                "on them, they may now differ. Give the dataset state_dict() and load_state_dict(), or reset these "
                "attributes in each epoch.",
                worker_id, ", ".join(lost),
            )  # fmt: skip
        return b"" if self.replays else self.objects

    @property
    def replay(self) -> PartitionReplay | None:
        """Replay for the replacement of a worker that reads partitions, else None."""
        if not self.replays or self.epoch is None or self.latest is None:
            return None
        return PartitionReplay(self.epoch, self.latest, self.objects_at_start, self.objects)

    def add(self, request: Any, changes: bytes) -> None:
        """Record an answer; empty `changes` mean none since the previous one."""
        if (epoch := epoch_of(request)) != self.epoch:
            self.epoch, self.replays = epoch, request.partition is not None
            self.epoch_start, self.objects_at_start = self.latest, self.objects
        if changes:
            generators, self.objects = unpack_changes(changes)
            self.latest = generators or self.latest


class Dispatch:
    """Open requests of one pool and their queues. Not thread-safe.

    Every open request is eventually answered. After a worker dies, requests that no live worker is known to build are
    resubmitted; a batch may therefore be built twice, and the later answer is dropped.
    """

    def __init__(
        self,
        launcher: Launcher,
        base_seed: int,
        new_inbox: Callable[[], Inbox],
        *,
        round_robin: bool,
        reports_generators: bool,
    ) -> None:
        self._base_seed, self._round_robin = base_seed, round_robin
        self._generators: dict[int, WorkerGenerators] | None = {} if reports_generators else None
        self._num_workers = 0
        self.open: dict[int, ProcessFuture] = {}
        self.dropped: deque[ProcessFuture] = deque()
        self._queues: list[RequestQueue] = [] if round_robin else [RequestQueue()]
        self._ready_fds: list[int] = []
        self._needs_repair = self._resized = self._is_opening = self._finished = False
        self.probe_orphaned = False
        """True if the latest probe has died with the process that had forked it: its request is not the cause."""
        self._built: dict[int, tuple[int, Any]] = {}
        """Epoch and latest mark of each partition of a live stream, whose batches cannot be built twice."""
        self.worker_set = WorkerSet(launcher, new_inbox)

    @property
    def keeps_objects(self) -> bool:
        """True if all answers report dataset and `collate_fn` unchanged."""
        return self._generators is not None and not any(states.objects for states in self._generators.values())

    def send(self, future: ProcessFuture) -> None:
        """Queue the request of a future; raises errors of pickling the request."""
        self.repair()
        payload = pickle.dumps(future.work, 5)
        self.open[future.task] = future
        self._queue_of(future.work).put(future.task, payload)
        self._start_others()

    def step(self, timeout_s: float | None) -> StepResult:
        """Wait for events and settle the futures that were answered.

        Futures of dead workers stay open: `repair` resubmits them, unless the caller closes them first.
        """
        if self._finished:
            return StepResult(0, [])
        self._start_others()
        self.repair()
        # An interrupt (Ctrl-C) before this list is empty again may lose an answer, and with it the order of an inbox:
        # `repair` then kills the workers of these descriptors.
        self._ready_fds = self.worker_set.wait(timeout_s)
        result = self._handle(self.worker_set.receive(self._ready_fds) if self._ready_fds else ())
        self._ready_fds = []
        for queue in self._queues:
            queue.flush()
        return result

    def restart(self, launcher: Launcher) -> None:
        """Replace all workers by those of another launcher."""
        self._handle(self.worker_set.restart(launcher))
        self.repair()

    def open_with(self, num_workers: int) -> None:
        """Start the first worker; the others start after its first request."""
        self._num_workers = num_workers
        if self._round_robin:
            self._resize_queues()
        self._start(0, self._queues[0])
        self._is_opening = True

    @property
    def num_workers(self) -> int:
        """Number of workers, live or to start with the first request."""
        return self._num_workers if self._is_opening else len(self.worker_set.members)

    def resize(self, num_workers: int) -> None:
        """Start workers, or stop surplus ones after their current request."""
        if self._finished:
            return
        self._start_others()
        surplus, self._num_workers = self._num_workers - num_workers, num_workers
        if self._round_robin:
            self._resize_queues()
        else:
            for _ in range(surplus):
                self._queues[0].stop_one()
        self._needs_repair = self._resized = True
        self.repair()

    def repair(self) -> None:
        """Start missing workers and resubmit lost requests.

        Deaths, canceled futures, interrupts and `resize` make this necessary.
        """
        while self.dropped:
            future = self.dropped.popleft()
            # Workers with their own generators build it all the same, as torch's do: it may draw from them.
            if self._generators is None and not self._is_live(future.work):
                self._needs_repair |= self.open.pop(future.task, None) is not None
        if self._ready_fds:
            self.worker_set.kill(self._ready_fds)
            self._ready_fds, self._needs_repair = [], True
        if self._needs_repair:
            started = self._start_missing()
            # A live worker with its own generators must not build a request twice, as it might if a request that it has
            # just taken were resubmitted: then only the queues of new workers are refilled.
            keeps = self._generators is not None or any(self._is_live(each.work) for each in self.open.values())
            self._resubmit_lost(started if keeps and not self._resized else range(len(self._queues)))
            self._needs_repair = self._resized = False

    def start_probe(self, future: ProcessFuture) -> Callable[[], bool]:
        """Start a worker for one future.

        Returns a function that is True once this worker has ended.
        """
        queue = RequestQueue()
        self.probe_orphaned = False
        probe = self._start(PROBE, queue)
        probe.stopping = True
        self.open[future.task] = future
        queue.put(future.task, pickle.dumps(future.work, 5))
        queue.finish()
        return lambda: self.worker_set.members.get(PROBE) is not probe

    def finish(self) -> None:
        """Let all workers end. No request is open, and none will come.

        Does not wait. Their ends are not deaths, and no other worker is started. Without effect after `close`.
        """
        if self._finished:
            return
        self._finished = True
        self.worker_set.finish()
        for queue in self._queues:
            queue.finish()

    def close(self, grace_s: float) -> None:
        """Shut down every worker."""
        self._finished = True
        self.open.clear()
        for queue in self._queues:
            queue.close()
        self.worker_set.close(grace_s)

    def _handle(self, events: Iterable[WorkerAnswer | Death]) -> StepResult:
        answers, deaths = 0, []
        for event in events:
            if isinstance(event, WorkerAnswer):
                self._settle(event)
                answers += 1
            else:
                event.member.inbox.close()  # all of its answers came before and are settled
                deaths.append(event)
                self.probe_orphaned |= event.member.worker_id == PROBE and event.exited.orphaned
                self._needs_repair = True
                self.worker_set.processes.pop(event.member.worker_id, None)
        return StepResult(answers, deaths)

    def _settle(self, answer: WorkerAnswer) -> None:
        future = self.open.get(answer.task)
        inbox, worker_id = answer.member.inbox, answer.member.worker_id
        if self._generators is not None and future is not None and worker_id != PROBE:
            self._generators[worker_id].add(future.work, answer.generators)
        if future is None or future.settled:  # canceled in the meantime
            self.open.pop(answer.task, None)
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
                if self._generators is not None and worker_id != PROBE:
                    value = value._replace(worker_state=self._generators[worker_id].latest)
                if self._is_live(future.work):
                    self._built[future.work.partition] = future.work.epoch, value.mark
                value.spans.append(("serialize", answer.began_ns, answer.ended_ns, worker_id))
                value.spans.append(("receive", began_ns, monotonic_ns(), MAIN))
                future.succeed(value, inbox.latest)
            else:
                future.fail(exceptions.rebuild(value, f"in DataLoader worker process {worker_id}"))
        del self.open[answer.task]

    def _start_others(self) -> None:
        if self._is_opening:
            self._is_opening, self._needs_repair = False, True  # after an interrupt, `repair` starts them
            self._start_missing()
            self._needs_repair = False

    def _start_missing(self) -> list[int]:
        """Start the workers that are missing, and return their ids."""
        started = []
        members = self.worker_set.members
        staying = sum(not member.stopping for member in members.values())
        # A worker with its own queue keeps its id, so a new one waits until the old one has ended.
        numbers = range(self._num_workers) if self._round_robin else count()
        for worker_id in numbers:
            if staying >= self._num_workers:
                break
            if worker_id not in members:
                self._start(worker_id, self._queues[worker_id if self._round_robin else 0])
                started.append(worker_id)
                staying += 1
        return started

    def _start(self, worker_id: int, queue: RequestQueue) -> WorkerHandle:
        setup = WorkerSetup(worker_id, self._num_workers, self._base_seed)
        if self._generators is not None and worker_id != PROBE:
            states = self._generators.setdefault(worker_id, WorkerGenerators())
            setup = setup._replace(
                reports_generators=True,
                initial_generators=states.initial_generators,
                initial_objects=states.initial_objects(worker_id),
                replay=states.replay,
            )
        return self.worker_set.start(setup, queue)

    def _resubmit_lost(self, numbers: Iterable[int]) -> None:
        """Refill queues with requests that no live worker is building, oldest first."""
        queues = [self._queues[number] for number in numbers]
        for queue in queues:
            queue.withdraw()
        running = {self.worker_set.status.task(worker_id) for worker_id in self.worker_set.members}
        for task, future in list(self.open.items()):
            if task not in running and not future.trial and (queue := self._queue_of(future.work)) in queues:
                if self._is_live(future.work):
                    self._open_after_built(future)
                queue.put(task, pickle.dumps(future.work, 5))

    def _open_after_built(self, future: ProcessFuture) -> None:
        """Make the request of a live stream begin after the latest answer.

        Another worker cannot repeat the sizes of the batches before.
        """
        epoch, mark = self._built.get(future.work.partition, (None, None))
        if epoch == future.work.epoch:
            future.work = future.work.opened_at(mark)

    @staticmethod
    def _is_live(request: Any) -> bool:
        return getattr(request, "continues", False)

    def _queue_of(self, request: Any) -> RequestQueue:
        return self._queues[request.turn % len(self._queues) if self._round_robin else 0]

    def _resize_queues(self) -> None:
        while len(self._queues) < self._num_workers:
            self._queues.append(RequestQueue())
        for queue in self._queues[self._num_workers :]:
            queue.close()
        del self._queues[self._num_workers :]
        for worker_id, member in self.worker_set.members.items():
            if worker_id >= self._num_workers:
                member.stopping = True
