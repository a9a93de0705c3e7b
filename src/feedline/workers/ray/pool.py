"""Pool of Ray actors that replaces lost ones.

Their requests are resubmitted. No background thread runs: all work happens inside calls of the pool.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from math import inf
from time import monotonic, monotonic_ns
from typing import Any

from feedline.core.batch import BatchResult
from feedline.core.telemetry import MAIN
from feedline.errors import ArgumentError, WorkerDiedError, WorkerError, WorkerStalledError
from feedline.workers.base import Builder, PoolOptions, PoolStatistics, Recovery
from feedline.workers.process import exceptions
from feedline.workers.process.deaths import DeathCount, describe_work
from feedline.workers.process.dispatch import PROBE, WorkerGenerators
from feedline.workers.process.futures import FuturePool, ProcessFuture
from feedline.workers.process.watchdog import StallTimer
from feedline.workers.process.worker_main import BUILT, WorkerSetup
from feedline.workers.ray.actor import ActorAnswer
from feedline.workers.ray.answers import EncodedBatch, StoredBatches
from feedline.workers.ray.members import RayMember, RayMembers
from feedline.workers.ray.suspects import STRIKES, SuspectRequests

_log = logging.getLogger("feedline")

_LONGEST_WAIT_S = 1.0
"""Longest single wait for Ray, after which the pool looks for workers without a place."""

_FEWEST_EACH = 2
"""Fewest requests of a worker: one that it builds, and the next one."""


_NODE_S = 60.0
"""Time within which Ray finds a dead node: 15 s of silence, and more where the cluster is busy."""


class _DeathBudget(DeathCount):
    """Counts deaths of actors; those of a node count as one."""

    def __init__(self, recovery: Recovery) -> None:
        super().__init__(recovery)
        self._nodes: dict[str, float] = {}
        """Time of the latest counted death on each node that was lost or out of reach, by `monotonic`."""

    def add(self, workers: int, lost_node: str | None) -> None:
        """Count `workers` deaths that were found together, as one.

        Connections to the actors of a lost node break before Ray finds that the node is dead. Deaths on one `lost_node`
        therefore count once a minute.
        """
        self.restarts += workers
        if lost_node is not None:
            if monotonic() < self._nodes.get(lost_node, -inf) + _NODE_S:
                return
            self._nodes[lost_node] = monotonic()
        self._count += 1

    def log(self, text: str) -> None:
        """Log a death within the limit."""
        _log.warning(
            "%s\nA new actor takes its place. Deaths in this epoch: %d of %d allowed.", text, self._count, self._limit
        )


class RayPool(FuturePool):
    """Pool of actors over `builder`; see `ray_pool` for `of_worker` and `start_timeout_s`.

    An idle worker takes the next request. With partitions or without a seed, a request goes to one worker: its `turn`
    modulo the number of workers. Thread-safe: calls are serialized.
    """

    def __init__(
        self,
        builder: Builder,
        options: PoolOptions,
        of_worker: Callable[[int], dict[str, Any]],
        start_timeout_s: float,
    ) -> None:
        super().__init__("Ray actors")
        self._builder, self._options = builder, options
        self._takes_turns = options.partitions or options.unseeded
        self._open: dict[int, ProcessFuture] = {}
        self._waiting: dict[int, deque[ProcessFuture]] = defaultdict(deque)
        self._generators: dict[int, WorkerGenerators] | None = {} if options.unseeded else None
        self._built: dict[int, tuple[int, Any]] = {}
        """Epoch and latest mark of each partition of a live stream, whose batches cannot be built twice."""
        self._budget = _DeathBudget(options.recovery)
        self._num_workers, self._has_warned = 0, False
        self.members = RayMembers(builder, options.worker_init_fn, of_worker, start_timeout_s)
        self._stored = StoredBatches(self.members.own_capacity(), options.allocate)
        self._suspects = SuspectRequests(builder, self.members, self._probe_setup, self._check)
        self._closed = False
        try:
            self.resize(options.num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[RayMember]:
        """The workers, with `pid`, `place` and `is_alive()`."""
        return [member for _, member in sorted(self.members.all.items())]

    def submit(self, request: Any) -> ProcessFuture:
        """See `WorkerPool`."""
        with self._lock:
            self._check()
            self._budget.begin_epoch(request.epoch)
            future = ProcessFuture(self, next(self._tasks), request)
            self._open[future.task] = future
            self._waiting[self._turn(future)].append(future)
            self._dispatch()
            self.members.pull_ahead()
        return future

    def drop(self, future: ProcessFuture) -> None:
        """See `FuturePool`. A worker that already has the request builds it."""

    def resize(self, num_workers: int) -> None:
        """See `WorkerPool`. Surplus workers finish their requests."""
        if not 0 < num_workers < PROBE:
            raise ArgumentError(f"a pool has between 1 and {PROBE - 1} Ray actors; got {num_workers}")
        with self._lock:
            self._check()
            self._num_workers = num_workers
            for worker_id, member in self.members.all.items():
                member.stopping = worker_id >= num_workers
            waiting = sorted((future for queue in self._waiting.values() for future in queue), key=lambda f: f.task)
            self._waiting.clear()
            for future in waiting:
                self._waiting[self._turn(future)].append(future)
            self._repair()

    def statistics(self) -> PoolStatistics:
        """See `WorkerPool`. Bytes are those in the object store of this node."""
        members = list(self.members.all.values())
        return PoolStatistics(
            workers=sum(member.is_alive() for member in members),
            in_flight=sum(not future.settled for future in list(self._open.values())),
            restarts=self._budget.restarts,
            arena_nbytes=self._stored.lent_nbytes,
            lent_nbytes=self._stored.lent_nbytes,
            pids=tuple(
                m.pid for m in members if m.is_alive() and m.pid is not None and self.members.is_on_this_machine(m)
            ),
        )

    def _close(self) -> None:
        """Kill all actors; see `FuturePool`.

        Waits up to `END_S` seconds for the actors of this machine to end.
        """
        with self._lock:
            self._open.clear()
            self._waiting.clear()
            members = list(self.members.all.values())
            self.members.all.clear()
            self.members.end(members, wait=True)

    def _turn(self, future: ProcessFuture) -> int:
        return future.work.turn % self._num_workers if self._takes_turns else 0

    def _probe_setup(self) -> WorkerSetup:
        return WorkerSetup(PROBE, self._num_workers, self._options.base_seed)

    def _wait(self, ready: Callable[[], bool]) -> None:
        timer = StallTimer(self._options.timeout_s, self._options.recovery.stall_s)
        while not ready():
            self._check()
            self._test_suspect()
            left_s = timer.left_s()
            if self._step(_LONGEST_WAIT_S if left_s is None else min(left_s, _LONGEST_WAIT_S)):
                timer.reset()
            elif not any(member.is_ready for member in self.members.all.values()):
                timer.reset()  # `start_timeout_s` limits the wait for a place; imports have no limit
                self._check_placement()
            else:
                self._check_placement()
            if timer.is_over() and not ready():
                limit = f"DataLoader timed out after {self._options.timeout_s:g} seconds"
                raise WorkerStalledError(f"{limit}.\n{self._describe_workers()}")
            if timer.is_log_due() and not ready():
                _log.warning("no batch for %g s.\n%s", self._options.recovery.stall_s, self._describe_workers())

    def _describe_workers(self) -> str:
        return self.members.describe({task: future.work for task, future in self._open.items()})

    def _step(self, timeout_s: float) -> bool:
        """Wait for an answer and handle it; True if there was one."""
        refs = {member.ref or member.queue[0][1]: member for member in self._awaited()}
        if not refs:
            threading.Event().wait(min(timeout_s, 0.01))
            self._repair()
            return False
        ready, _ = self.members.ray.wait(list(refs), num_returns=1, timeout=timeout_s)
        answered = False
        for ref in ready:
            answered |= self._handle(refs[ref], ref)
        self._repair()
        return answered

    def _awaited(self) -> list[RayMember]:
        """Members with an unanswered call."""
        return [member for member in self.members.all.values() if member.ref is not None or member.queue]

    def _handle(self, member: RayMember, ref: Any) -> bool:
        """Handle the result of a call; True if it was a batch."""
        errors = self.members.ray.exceptions
        try:
            value = self.members.ray.get(ref)
        except (errors.RayTaskError, errors.RuntimeEnvSetupError, errors.ActorUnschedulableError) as error:
            self._fail_all(WorkerError(f"{member}: {error}"))
            return False
        except errors.RayError as error:
            self._replace_dead(member, error)
            return False
        if member.ref is not None:
            if (failure := self.members.advance(member, value)) is not None:
                self._fail_all(failure)
            return False
        answer = ActorAnswer(*value)
        del value, ref
        self._settle(member, member.queue[0][0], answer)
        member.queue.popleft()
        return True

    def _settle(self, member: RayMember, future: ProcessFuture, answer: ActorAnswer) -> None:
        states = None if self._generators is None else self._generators[member.worker_id]
        if states is not None:
            states.add(future.work, answer.generators)
        self._open.pop(future.task, None)
        shift_ns = member.shift_ns(answer.ended_ns, here=self.members.is_on_this_machine(member))
        if future.settled:  # canceled in the meantime
            return
        if answer.kind != BUILT:
            future.fail(exceptions.rebuild(pickle.loads(answer.value), f"in Ray actor {member.worker_id}"))
            return
        began_ns = monotonic_ns()
        try:
            built: BatchResult = self._stored.decode(EncodedBatch(*answer.value))
        except Exception as error:  # noqa: BLE001 - it is raised again by the future
            error.add_note(f"feedline: raised when {future.work}, from worker {member.worker_id}, was unpickled")
            future.fail(error)
            return
        if states is not None:
            built = built._replace(worker_state=states.latest)
        if _is_live(future.work):
            self._built[future.work.partition] = future.work.epoch, built.mark
        spans = [*built.spans, ("serialize", answer.began_ns, answer.ended_ns, member.worker_id)]
        built.spans[:] = [(name, start - shift_ns, stop - shift_ns, worker) for name, start, stop, worker in spans]
        built.spans.append(("receive", began_ns, monotonic_ns(), MAIN))
        future.succeed(built)

    def _dispatch(self) -> None:
        """Give waiting requests to members that are ready."""
        ready = [member for member in self.members.all.values() if member.is_alive()]
        if self._takes_turns:
            for member in ready:
                while (future := self._next(member.worker_id)) is not None:
                    self._send(member, future)
            return
        most = max(_FEWEST_EACH, -(-len(self._open) // max(1, self._num_workers)))
        while ready:
            idlest = min(ready, key=lambda member: len(member.queue))
            if len(idlest.queue) >= most or (future := self._next(0)) is None:
                return
            self._send(idlest, future)

    def _next(self, turn: int) -> ProcessFuture | None:
        """Remove and return the next request that must be built, if any."""
        queue = self._waiting[turn]
        while queue:
            future = queue.popleft()
            # Workers with their own generators build a canceled request all the same, as torch's do: it may draw.
            if not future.settled or self._generators is not None or _is_live(future.work):
                return future
            self._open.pop(future.task, None)
        return None

    def _send(self, member: RayMember, future: ProcessFuture) -> None:
        try:
            self.members.send(member, future)
        except self.members.ray.exceptions.RayError:  # a dead actor: its next answer says so
            self._waiting[self._turn(future)].appendleft(future)
        except Exception as error:  # noqa: BLE001 - a request that cannot be pickled; raised again by the future
            self._open.pop(future.task, None)
            future.fail(error)

    def _repair(self) -> None:
        """End surplus workers, start missing ones, and distribute requests."""
        if self._closed or self._error is not None:
            return
        members = self.members.all
        surplus = [member for member in members.values() if member.stopping and not member.queue]
        for member in surplus:
            del members[member.worker_id]
        self.members.end(surplus)
        if self._suspects:  # a probe gets the place of the dead worker
            return
        for worker_id in range(self._num_workers):
            if worker_id not in members:
                self.members.add(self._setup(worker_id))
        self._dispatch()

    def _setup(self, worker_id: int) -> WorkerSetup:
        setup = WorkerSetup(worker_id, self._num_workers, self._options.base_seed)
        if self._generators is None:
            return setup
        states = self._generators.setdefault(worker_id, WorkerGenerators())
        return setup._replace(
            reports_generators=True,
            initial_generators=states.initial_generators,
            initial_objects=states.initial_objects(worker_id),
            replay=states.replay,
        )

    def _check_placement(self) -> None:
        """Continue without workers that Ray cannot place, or fail."""
        members = self.members.all.values()
        late = [m for m in members if m.node_id is None and monotonic() > m.began + self.members.start_timeout_s]
        if not late or self._error is not None:
            return
        if self._takes_turns or not any(member.is_ready for member in members):
            self._fail_all(self.members.no_place_error(late[0]))
        elif not self._has_warned:
            self._has_warned = True
            _log.warning("%s\nThe others continue without it.", self.members.no_place_error(late[0]))

    def _replace_dead(self, member: RayMember, reason: BaseException) -> None:
        """Count a death, and take back the requests of the dead.

        If the node of the actor has died, all actors of that node are dead.
        """
        if member.node_id is None and self.members.has_lost_node(member.began):
            # Ray had given it to a node that it then found dead: it never ran, so no request is to blame.
            del self.members.all[member.worker_id]
            self.members.end([member])
            return
        node_died = self.members.is_node_dead(member.node_id)
        is_lost = node_died or isinstance(reason, self.members.ray.exceptions.ActorUnavailableError)
        dead = [m for m in self.members.all.values() if m is member or (node_died and m.node_id == member.node_id)]
        head = member.queue[0][0] if member.queue and member.is_ready else None
        self._budget.add(len(dead), member.node_id if is_lost else None)
        if head is not None and not node_died:
            head.strikes += 1
        for each in dead:
            self._take_back(each, head if head is not None and head.strikes == STRIKES else None)
        self.members.end(dead)
        self.members.open_waiting()
        doing = "" if head is None else describe_work(head.work, -1)
        text = _describe_death(member, doing, reason, "Its node has died." if node_died else "")
        if head is not None and head.strikes == STRIKES:
            # The request probably caused these deaths: they do not count against the limit until that is known.
            self._budget.adjust(-STRIKES)
            self._suspects.add(head, text)
            _log.warning("%s\nThis request has now killed two actors. It is tried again in an actor of its own.", text)
        elif self._budget.is_exceeded:
            self._fail_all(WorkerDiedError(text))
        else:
            self._budget.log(text)

    def _take_back(self, member: RayMember, suspect: ProcessFuture | None) -> None:
        del self.members.all[member.worker_id]
        for future, _ in reversed(member.queue):
            if future is suspect:
                continue
            if _is_live(future.work):
                self._open_after_built(future)
            self._waiting[self._turn(future)].appendleft(future)
        member.queue.clear()

    def _open_after_built(self, future: ProcessFuture) -> None:
        """Make the request of a live stream begin after the latest answer.

        Another worker cannot build the earlier batches again.
        """
        epoch, mark = self._built.get(future.work.partition, (None, None))
        if epoch == future.work.epoch:
            future.work = future.work.opened_at(mark)

    def _test_suspect(self) -> None:
        """Test suspicious requests alone; fail them or leave out samples."""
        while self._suspects:
            future, verdict = self._suspects.test_first()
            if verdict is None:  # it does not kill
                self._budget.adjust(STRIKES)
            if future.settled:
                self._open.pop(future.task, None)
                continue
            future.strikes = 0
            self._waiting[self._turn(future)].appendleft(future)
            if self._budget.is_exceeded:
                self._fail_all(WorkerDiedError(self._suspects.latest))
        self._repair()

    def _fail_all(self, error: BaseException) -> None:
        self._error = error
        for future in self._open.values():
            future.fail(error)
        self._open.clear()
        self._waiting.clear()


def _is_live(request: Any) -> bool:
    return getattr(request, "continues", False)


def _describe_death(member: RayMember, doing: str, reason: BaseException, advice: str = "") -> str:
    """Compose the message about a dead worker; it begins like torch's."""
    what = str(reason).strip()
    pid = "" if member.pid is None else f" (pid(s) {member.pid})"
    parts = [f"DataLoader worker{pid} exited unexpectedly: {member}, a Ray actor{doing}.", f"Ray reports: {what}"]
    return "\n".join([*parts, advice] if advice else parts)
