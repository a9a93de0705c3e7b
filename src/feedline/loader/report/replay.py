"""Replay of recorded batches through a model of the engine.

The model has the loader's window of requests, its workers, and CPUs that all tasks share. Times are in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple, Self

from feedline.workers.wait_samples import GOLDEN

INLINE, THREAD, PROCESS = "inline", "thread", "process"


class Task(NamedTuple):
    """A unit of work."""

    wait_s: float = 0.0
    """Seconds of waiting: for files, networks, locks, a device."""
    cpu_s: float = 0.0
    """Seconds of computing on a CPU of its own."""
    width: float = 1.0
    """CPUs in use while it computes; more than 1 if it starts threads."""
    held_s: float = 0.0
    """Seconds of the task in which it holds an exclusive resource, such as a lock."""
    copying: float = 0.0
    """Use of memory bandwidth while it computes, as a share of that of a thread that only copies."""

    @property
    def alone_s(self) -> float:
        """Seconds on an idle machine."""
        return self.wait_s + self.cpu_s

    def __add__(self, other: Task) -> Task:  # type: ignore[override]
        cpu_s, held_s = self.cpu_s + other.cpu_s, self.held_s + other.held_s
        used = self.cpu_s * self.width + other.cpu_s * other.width
        copied = self.cpu_s * self.copying + other.cpu_s * other.copying
        width, copying = (used / cpu_s, copied / cpu_s) if cpu_s else (1.0, 0.0)
        return Task(self.wait_s + other.wait_s, cpu_s, width, held_s, copying)


NO_TASK = Task()


MAIN_STAGES = ("sample", "receive", "copy", "device_decode", "device_transform", "step")
"""Stages of the training process: those of every loader."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Tasks of one batch, each as on an idle machine."""

    work: Mapping[str, Task]
    """By stage, in the order in which a worker does them: "fetch", "collate", "serialize"."""
    sample: Task = NO_TASK
    """The sampler, in the training process."""
    receive: Task = NO_TASK
    """Receiving, in the training process."""
    copy: Task = NO_TASK
    """Delivery to page-locked memory or a device, as far as the training process waits for it."""
    device_decode: Task = NO_TASK
    """Decoding on the device, as far as the training process waits for it."""
    device_transform: Task = NO_TASK
    """The transform on the device."""
    step: Task = NO_TASK
    """The loop's own work."""
    whole_work: Task = field(init=False, repr=False, compare=False)
    """The sum of `work`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole_work", sum(self.work.values(), NO_TASK))

    def without(self, stage: str) -> BatchTimes:
        """The batch with one stage that takes no time."""
        return self.scale(stage, 0.0)

    def scale(self, stage: str, factor: float) -> BatchTimes:
        """The batch with the time of one stage multiplied."""
        if stage in self.work:
            return replace(self, work={**self.work, stage: _scale(self.work[stage], factor)})
        if stage not in MAIN_STAGES:
            return self  # a stage that other batches have
        changed: dict[str, Any] = {stage: _scale(getattr(self, stage), factor)}
        return replace(self, **changed)

    def without_exclusion(self) -> BatchTimes:
        """The batch if workers did not exclude each other."""
        return replace(self, work={stage: task._replace(held_s=0.0) for stage, task in self.work.items()})

    def work_after(self, wait_s: float) -> Task:
        """The sum of `work`, which waits so much longer."""
        return self.whole_work._replace(wait_s=self.whole_work.wait_s + wait_s) if wait_s else self.whole_work

    def with_longer_step(self, seconds: float) -> BatchTimes:
        """The batch with a step that waits longer, or shorter if negative."""
        return replace(self, step=self.step._replace(wait_s=max(self.step.wait_s + seconds, 0.0)))

    def with_step(self, seconds: float, threads: float) -> BatchTimes:
        """The batch with a step of this length, on so many CPUs."""
        wait_s = min(self.step.wait_s, seconds)
        return replace(self, step=Task(wait_s, seconds - wait_s, threads))

    def only_step(self) -> BatchTimes:
        """The batch if data took no time: only the step is left."""
        return BatchTimes({}, step=self.step)


def _scale(task: Task, factor: float) -> Task:
    return Task(task.wait_s * factor, task.cpu_s * factor, task.width, task.held_s * factor, task.copying)


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """Arguments of a loader that determine the overlap of its batches."""

    num_workers: int = 0
    prefetch_factor: int = 2
    in_order: bool = True
    method: str = INLINE
    round_robin: bool = False
    """Batch b belongs to worker b modulo `num_workers`; else an idle worker takes the next batch."""

    @property
    def ahead(self) -> int:
        """Requests in flight while the loop computes."""
        return 0 if self.method == INLINE else max(1, self.prefetch_factor) * self.num_workers


@dataclass(frozen=True, slots=True)
class Machine:
    """CPUs, lock and latency that tasks share."""

    cpus: float = 1.0
    """CPUs that affinity, quota and other programs leave."""
    gil_share: float = 1.0
    """Share of the computing of threads that holds Python's lock."""
    lock_takes: float = 1.0
    """Times that a step takes Python's lock again, after waiting or native code."""
    latency_s: float = 0.0
    """Seconds per batch in which the loop waits for something outside all stages, such as the wake-up of a worker."""
    copiers: float = inf
    """Threads that copy at full speed, before memory bandwidth slows them down."""
    step_wakes: float = 1.0
    """Times that a step is woken after waiting."""
    slice_s: float = 0.0
    """Seconds for which a computing task keeps its CPU when the loop is woken and no CPU is free."""


class _TaskPhase(NamedTuple):
    """A wait, and the computing after it."""

    wait_s: float
    cpu_s: float = 0.0
    width: float = 1.0
    copying: float = 0.0


_Process = Generator[_TaskPhase | None, None, None]

LOCKED_SHARE = 0.9
"""Least share of computing under Python's lock at which the loop has to wait for the lock."""

SWITCH_S = 0.005
"""Time after which a thread gives Python's lock to others that wait: `sys.getswitchinterval()`."""

PIECES = 4
"""Number of parts of a task that waits and computes: samples do both in turn."""

ONE_KIND_SHARE = 0.05
"""Share below which the smaller of waiting and computing does not divide a task."""


def _phases(task: Task, later: float = 0.0) -> Sequence[_TaskPhase]:
    """Waits and computing of a task.

    `later` is the part of its first wait that comes last instead. Workers with equal tasks would else compute at the
    same moments, and wait at the same moments, for ever: they share CPUs evenly. A system lets one of them compute
    before the others, which parts them.
    """
    wait_s, cpu_s, width, _, copying = task
    if min(wait_s, cpu_s) <= ONE_KIND_SHARE * (wait_s + cpu_s):
        return (_TaskPhase(wait_s, cpu_s, width, copying),)
    piece = _TaskPhase(wait_s / PIECES, cpu_s / PIECES, width, copying)
    if not later:
        return (piece,) * PIECES
    first = piece._replace(wait_s=(1 - later) * piece.wait_s)
    return (first, *(piece,) * (PIECES - 1), _TaskPhase(later * piece.wait_s))


@dataclass(slots=True)
class _SimulatedClock:
    """Time of processes that sleep, or compute on shared CPUs and memory.

    All computing processes progress at one rate, and virtual time passes at this rate. A process therefore ends when
    virtual time has advanced by its computing time, whatever other processes do.
    """

    limit: float
    """Greatest width that computes at full speed: the CPUs, or for threads the limit of the lock."""
    copiers: float = inf
    """Greatest sum of copying at full speed: see `Machine`."""
    now: float = 0.0
    _virtual: float = 0.0
    _width: float = 0.0
    _copying: float = 0.0
    _number: int = 0
    _asleep: list[tuple[float, int, _Process, _TaskPhase]] = field(default_factory=list)
    _computing: list[tuple[float, int, _Process, _TaskPhase]] = field(default_factory=list)

    @property
    def computing(self) -> int:
        """Number of processes that compute."""
        return len(self._computing)

    @property
    def crowd(self) -> float:
        """Computing tasks for each CPU; 0 while a CPU is free."""
        # Sums of widths have rounding errors.
        return self._width / self.limit if self._width > self.limit - 1 + 1e-6 else 0.0

    def resume(self, process: _Process) -> None:
        """Let a process begin, or continue after it was parked."""
        for phase in process:
            if phase is None:  # parked
                return
            wait_s, cpu_s, _, _ = phase
            if wait_s > 0:
                self._number += 1
                heappush(self._asleep, (self.now + wait_s, self._number, process, phase))
                return
            if cpu_s > 0:
                self._compute(process, phase)
                return

    def _compute(self, process: _Process, phase: _TaskPhase) -> None:
        _, cpu_s, width, copying = phase
        self._number += 1
        self._width += width
        self._copying += copying
        heappush(self._computing, (self._virtual + cpu_s, self._number, process, phase))

    def run(self) -> None:
        """Run until every process is parked or has ended."""
        asleep, computing, limit, copiers = self._asleep, self._computing, self.limit, self.copiers
        while asleep or computing:
            # Progress of computing processes, by CPUs and memory bandwidth.
            rate = limit / self._width if self._width > limit else 1.0
            if self._copying > copiers:
                rate = min(rate, copiers / self._copying)
            done_s = self.now + (computing[0][0] - self._virtual) / rate if computing else inf
            if asleep and asleep[0][0] <= done_s:
                woken_s, _, process, phase = heappop(asleep)
                # Virtual time stands still while no process computes: it would otherwise count as progress of the next.
                if computing:
                    self._virtual += (woken_s - self.now) * rate
                self.now = woken_s
                if phase[1] > 0:
                    self._compute(process, phase)
                    continue
            else:
                self._virtual, _, process, (_, _, width, copying) = heappop(computing)
                self.now = done_s
                # 0 after the last one: rounding errors of the sums would grow over thousands of batches.
                self._width = self._width - width if computing else 0.0
                self._copying = self._copying - copying if computing else 0.0
            self.resume(process)


class _Engine:
    """The loop, its window and its workers, as processes of a clock."""

    def __init__(self, batches: Sequence[BatchTimes], setting: EngineSetting, machine: Machine) -> None:
        # Each thread needs the lock for this share of its computing, so at most 1 / share of them compute at once.
        locked = machine.gil_share if setting.method == THREAD else 0.0
        self._is_locked = locked >= LOCKED_SHARE
        self._clock = _SimulatedClock(min(machine.cpus, 1 / locked) if locked else machine.cpus, machine.copiers)
        self._batches, self._setting, self._machine = batches, setting, machine
        workers = 0 if setting.method == INLINE else setting.num_workers
        lock_s = _lock_wait_s(batches, workers)
        self._work = [_phases(batch.work_after(lock_s), turn * GOLDEN % 1.0) for turn, batch in enumerate(batches)]
        self._queues: list[deque[int]] = [deque() for _ in range(workers if setting.round_robin and workers else 1)]
        self._idle: list[list[int]] = [[] for _ in self._queues]
        self._workers = [self._run_worker(number) for number in range(workers)]
        self._loop = self._run_loop()
        self._loop_is_parked = False
        self._arrived: deque[int] = deque()
        self._received: set[int] = set()
        self.delivered_s: list[float] = []
        """Times at which the loop got its batches."""
        self.steps_s: list[float] = []
        self.late_s = self.late_in_steps_s = 0.0
        """Time in which the loop was awake and had no CPU, in all and within its steps."""

    def run(self) -> Self:
        """Deliver all batches."""
        for process in [*self._workers, self._loop]:
            self._clock.resume(process)
        self._clock.run()
        return self

    def _run_worker(self, number: int) -> _Process:
        queue = number % len(self._queues)
        while True:
            while not self._queues[queue]:
                self._idle[queue].append(number)
                yield None
            taken = self._queues[queue].popleft()
            yield from self._work[taken]
            self._arrived.append(taken)
            if self._loop_is_parked:
                self._loop_is_parked = False
                self._clock.resume(self._loop)

    def _submit(self, number: int) -> None:
        queue = number % len(self._queues)
        self._queues[queue].append(number)
        if self._idle[queue]:
            self._clock.resume(self._workers[self._idle[queue].pop(0)])

    def _run_loop(self) -> _Process:
        ahead, total, drawn = self._setting.ahead, len(self._batches), 0
        window: list[int] = []
        latency = Task(self._machine.latency_s)
        for turn, batch in enumerate(self._batches):
            # The due batch comes in addition: `ahead` requests are in flight while the loop computes.
            while len(window) <= ahead and drawn < total:
                if self._batches[drawn].sample is not NO_TASK:
                    yield from _phases(self._batches[drawn].sample)
                self._submit(drawn)
                window.append(drawn)
                drawn += 1
            if self._workers:
                yield from self._receive(window)
            else:
                yield from self._work[turn]
            window.remove(self._due(window))
            for task in (batch.copy, batch.device_decode, batch.device_transform, latency):
                if task is not NO_TASK:
                    yield from _phases(task)
            self.delivered_s.append(self._clock.now)
            yield from self._step(batch.step)
            self.steps_s.append(self._clock.now - self.delivered_s[-1])

    def _due(self, window: list[int]) -> int:
        if self._setting.in_order or not self._workers:
            return window[0]
        return next(number for number in window if number in self._received)

    def _receive(self, window: list[int]) -> _Process:
        """Unpack received batches until the due one is there."""
        while not self._is_due(window):
            if not self._arrived:
                self._loop_is_parked = True
                yield None
                yield from self._take_lock(1.0) if self._is_locked else self._take_cpu()
            while self._arrived:
                number = self._arrived.popleft()
                yield from _phases(self._batches[number].receive)
                self._received.add(number)

    def _step(self, step: Task) -> _Process:
        """A step, which takes a CPU or the lock after each wait."""
        if not (self._is_locked or (self._machine.slice_s and step.wait_s > 0)):
            yield from _phases(step)
            return
        late_s, takes = self.late_s, self._machine.lock_takes if self._is_locked else self._machine.step_wakes
        parts = min(max(round(takes), 1), PIECES)
        for _ in range(parts):
            yield _TaskPhase(step.wait_s / parts)
            yield from self._take_lock(takes / parts) if self._is_locked else self._take_cpu()
            yield _TaskPhase(0.0, step.cpu_s / parts, step.width)
        self.late_in_steps_s += self.late_s - late_s

    def _take_lock(self, times: float) -> _Process:
        """Wait until computing threads give Python's lock back.

        A thread keeps the lock for one `SWITCH_S` while others wait for it. Then any waiting thread gets the lock: with
        n computing threads, one wait takes (n + 1) / 2 intervals on average. The lock is taken `times` times.
        """
        waited_s, slice_s = 0.0, times * SWITCH_S / 4
        while waited_s < times * SWITCH_S * (self._clock.computing + 1) / 2 and self._clock.computing:
            yield _TaskPhase(slice_s)
            waited_s += slice_s

    def _take_cpu(self) -> _Process:
        """Wait for a free CPU, or for the turns of its tasks."""
        slice_s, woken_s = self._machine.slice_s, self._clock.now
        if slice_s:
            yield _TaskPhase(_WAKE_UP_S)
            while self._clock.crowd * slice_s > self._clock.now - woken_s:
                yield _TaskPhase(slice_s / 4)
        self.late_s += self._clock.now - woken_s

    def _is_due(self, window: list[int]) -> bool:
        return window[0] in self._received or (not self._setting.in_order and not self._received.isdisjoint(window))


_WAKE_UP_S = 1e-6
"""Time until the loop is awake: the worker that has woken it begins its next batch before."""


LEAST_REPLAYED = 48
"""Least number of batches of a replay: fewer are repeated."""


def replay(batches: Sequence[BatchTimes], setting: EngineSetting, machine: Machine) -> float:
    """Mean seconds from batch to batch, once the window is full.

    ValueError without batches.
    """
    if not batches:
        raise ValueError("a replay needs at least one batch")
    filling = setting.ahead + 1
    number = _number(batches, setting)
    delivered_s = _run(batches, setting, machine).delivered_s
    # A loop that receives all that has arrived does so in bursts of one window: the mean over one window of starts. In
    # the last window nothing new is requested, and in the first one the workers have nothing yet: neither counts.
    starts = range(filling, 2 * filling)
    period_s = sum(delivered_s[start + number] - delivered_s[start] for start in starts) / (number * filling)
    return max(period_s, _held_s(batches))


def _held_s(batches: Sequence[BatchTimes]) -> float:
    """Mean seconds for which a batch holds an exclusive resource."""
    return sum(batch.whole_work.held_s for batch in batches) / len(batches)


def _lock_wait_s(batches: Sequence[BatchTimes], workers: int) -> float:
    """Mean wait of a batch for its exclusive resource."""
    if workers < 2 or not (held_s := _held_s(batches)):
        return 0.0
    return lock_wait_s(workers, held_s, sum(batch.whole_work.alone_s for batch in batches) / len(batches))


def lock_wait_s(workers: int, held_s: float, alone_s: float) -> float:
    """Mean wait for a lock held for `held_s` of `alone_s`.

    Mean value analysis of a closed queueing network (Reiser and Lavenberg, 1980): a worker that comes to the lock finds
    the queue that one worker less would have.
    """
    others_s = max(alone_s - held_s, 0.0)
    queued = passed_s = 0.0
    for number in range(1, workers + 1):
        passed_s = held_s * (1 + queued)
        queued = number * passed_s / (others_s + passed_s)
    return passed_s - held_s


def replay_step(batches: Sequence[BatchTimes], setting: EngineSetting, machine: Machine) -> float:
    """Mean seconds of a step.

    Waits for CPUs and for Python's lock are included.
    """
    steps_s = _run(batches, setting, machine).steps_s[setting.ahead + 1 :]
    return sum(steps_s) / len(steps_s)


class LateTimes(NamedTuple):
    """Mean seconds for which a loop waits for CPUs, per batch."""

    whole_s: float
    step_s: float
    """Part within the step."""


def replay_late(batches: Sequence[BatchTimes], setting: EngineSetting, machine: Machine) -> LateTimes:
    """Waits of the loop for CPUs after its wake-ups, per batch."""
    engine = _run(batches, setting, machine)
    return LateTimes(engine.late_s / len(engine.steps_s), engine.late_in_steps_s / len(engine.steps_s))


def _run(batches: Sequence[BatchTimes], setting: EngineSetting, machine: Machine) -> _Engine:
    number = _number(batches, setting) + 3 * (setting.ahead + 1)
    return _Engine([batches[turn % len(batches)] for turn in range(number)], setting, machine).run()


def _number(batches: Sequence[BatchTimes], setting: EngineSetting) -> int:
    """Number of batches to replay: whole cycles of the recording.

    Each recorded batch counts equally often, whatever the setting.
    """
    return len(batches) * -(-max(LEAST_REPLAYED, 2 * (setting.ahead + 1)) // len(batches))
