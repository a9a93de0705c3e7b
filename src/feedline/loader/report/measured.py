"""Recorded spans, separated into computing, waiting and run delay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Self

from feedline.core.telemetry import (
    BATCH,
    CPU,
    FILES,
    HELPERS,
    MAIN,
    NBYTES,
    PLACES,
    RUN_DELAY,
    STEP_THREADS_DELAY,
    SWITCHES,
    Span,
)
from feedline.loader.report.replay import MAIN_STAGES, NO_TASK, BatchTimes, Task
from feedline.loader.report.stats import Stats, is_wall

BUILD_STAGES = ("fetch", "collate", "serialize")
"""Stages of building a batch, in their order. Other spans are within these."""


TURN = "turn"
"""Key of a worker's time before the stages of a batch."""


MULTITHREADED_CPUS = 1.1
"""CPU seconds per second above which a task counts as computing in several threads."""


LEAST_BATCHES = 8
"""Number of batches needed to compare the run delay, which is read ten times a second, with the computing time."""


@dataclass(frozen=True)
class Measured:
    """Batches of the latest spans, and their times.

    Times are in seconds, and means are per batch. Waiting and computing times are those of an idle machine, without the
    run delay.
    """

    batches: tuple[BatchTimes, ...] = ()
    period_s: float = 0.0
    """From batch to batch, without the first of an epoch."""
    wait_s: float = 0.0
    step_s: float = 0.0
    startup_s: float = 0.0
    """Wait for the first batch of an epoch, and for workers that began later than the first one."""
    listing_s: float = 0.0
    """Part of this wait in which the sampler lists its order, whether workers start or not."""
    closing_s: float = 0.0
    """Time from the end of an epoch until its workers have ended."""
    delay: Mapping[int, float] = field(default_factory=dict)
    """Run delay of each worker, as a multiple of its CPU time; -1 is the training process."""
    delayed_s: float = 0.0
    """Run delay of workers and loop, summed."""
    late_s: float = 0.0
    """Run delay of the loop after wake-ups: the part that the times of its stages still contain."""
    fastest_step_s: float = 0.0
    """Time that a tenth of the steps do not exceed, on the wall clock."""
    step_threads_delay_s: float = 0.0
    """Run delay of each of the threads that compute steps with the loop's thread."""
    delivery_s: float | None = None
    """Time from a worker to a loop that waits; None if unknown."""
    others_cpus: float | None = None
    """CPUs that other programs used during the epoch; None if unknown."""
    lock_share: float | None = None
    """Share of the requests of threads for Python's lock that find it in use."""
    contended_share: float = 0.0
    """Share of the workers' time spent waiting for a lock that another worker holds."""
    helpers_share: float = 0.0
    """Share of the workers' computing that is done by threads that they have started."""
    outside_share: float | None = None
    """Share of the time of worker threads spent waiting for files, networks and their own threads; None if unknown."""
    step_outside_share: float | None = None
    """Share of the waits of steps that are not for Python's lock; None if unknown."""
    step_waits: float = 0.0
    """Number of times that a step stops to wait."""
    step_stops: tuple[tuple[int, float], ...] = ()
    """For each step whose clocks were read: number of its waits, and their seconds, run delay included."""
    padded_steps: tuple[tuple[int, float], ...] = ()
    """Places of padded batches, padding included, each with the seconds of the step on the batch."""
    has_cpu: bool = False
    """True if CPU times were measured; else all work counts as computing."""
    files_nbytes: float = 0.0
    """Bytes that a batch has copied out of files and pipes, by whatever code."""
    cached_copying: float = 1.0
    """Rate of the stage that copies for the longest time, as a multiple of the rate without caches; at least 1."""

    @classmethod
    def of(cls, recent: Sequence[Sequence[Span]], stats: Stats, ahead: int = 0) -> Self:
        """Figures of the latest spans; without spans, of the totals.

        `ahead` is that of the `EngineSetting`: with it, the time of workers between two batches counts.
        """
        tables = [_BatchSpans.of(spans) for spans in recent]
        later = [table for table in tables if "step" in table.wall]
        if not later:
            return cls._of_totals(stats)
        starts_s = _take_starts(tables)
        has_delay = len(later) >= LEAST_BATCHES
        delay = _delays(tables) if has_delay else {}
        # The latest batches may be so short that no CPU time was read for some stage.
        ratios = {**_ratios_of_totals(stats), **_cpu_ratios(tables)}
        helped = _helped_shares(tables, ratios)
        many = {worker for worker, part in helped.items() if part >= HELPED}
        fastest_s = sorted(table.wall["step"] for table in later)[len(later) // 10]
        batches = _without_debts([table.batch(ratios, delay, has_helpers=table.worker in many) for table in later])
        batches = _with_long_steps(batches, [min(table.wall["step"], fastest_s) for table in later])
        batches = _with_turns(batches, later, ahead)
        return cls(
            batches,
            period_s=_mean(table.wall["step"] + table.wall.get("wait", 0.0) for table in later),
            wait_s=_mean(table.wall.get("wait", 0.0) for table in later),
            step_s=_mean(table.wall["step"] for table in later),
            startup_s=stats.startup_s + starts_s,
            listing_s=_listing_s(stats),
            closing_s=stats.closing_s,
            delivery_s=_delivery_s(later),
            others_cpus=stats.others_cpus,
            lock_share=stats.lock_share,
            contended_share=stats.contended_share or 0.0,
            helpers_share=_mean(helped.values()),
            outside_share=stats.outside_share,
            step_outside_share=stats.step_outside_share,
            step_waits=stats.step_waits,
            step_stops=tuple(table.stops for table in later if table.stops is not None),
            delay=delay,
            delayed_s=sum(sum(table.delay.values()) for table in tables) / len(later) if has_delay else 0.0,
            late_s=_late_s(later, batches) if has_delay else 0.0,
            fastest_step_s=fastest_s,
            step_threads_delay_s=_mean(table.step_threads_delay_s for table in later) if has_delay else 0.0,
            padded_steps=tuple(_padded_steps(tables)),
            has_cpu=bool(ratios),
            files_nbytes=files_nbytes_of(recent),
        )

    @classmethod
    def _of_totals(cls, stats: Stats) -> Self:
        later = max(stats.batches - 1, 0)
        if not later:
            return cls(startup_s=stats.startup_s, closing_s=stats.closing_s)
        tasks = {
            stage: _task(
                times.total_s / stats.batches, None if times.cpu_s is None else times.cpu_s / stats.batches, 0.0
            )
            for stage, times in stats.stages.items()
        }
        step_s = stats.step_s / later
        step = _task(step_s, None if stats.step_cpu_s is None else stats.step_cpu_s / later, 0.0)
        batch = BatchTimes(
            {stage: tasks[stage] for stage in BUILD_STAGES if stage in tasks},
            **{stage: tasks.get(stage, NO_TASK) for stage in MAIN_STAGES if stage != "step"},
            step=step,
        )
        wait_s = max(stats.wait_s - stats.startup_s, 0.0) / later
        return cls((batch,), step_s + wait_s, wait_s, step_s, stats.startup_s, stats.closing_s)

    def with_copying(self, nbytes: float, rate: float) -> Self:
        """The same batches, of `nbytes` each, with their use of memory bandwidth.

        Each stage of building writes a batch once, and the first copies what is read from files. A thread copies at
        most `rate` bytes per second; one that copies faster finds bytes in caches.
        """
        copy_s = {stage: (nbytes + self.files_nbytes * (stage == "fetch")) / rate for stage in BUILD_STAGES}

        def copies(stage: str, task: Task) -> Task:
            return task._replace(copying=min(copy_s[stage] / task.cpu_s, 1.0) if task.cpu_s else 0.0)

        def copied(batch: BatchTimes) -> BatchTimes:
            return replace(batch, work={stage: copies(stage, task) for stage, task in batch.work.items()})

        cpu_s = {stage: self.mean(stage).cpu_s for stage in BUILD_STAGES}
        longest = max(BUILD_STAGES, key=lambda stage: min(copy_s[stage], cpu_s[stage]))
        faster = max(copy_s[longest] / cpu_s[longest], 1.0) if cpu_s[longest] else 1.0
        return replace(self, batches=tuple(map(copied, self.batches)), cached_copying=faster)

    @property
    def copiers(self) -> float:
        """Mean use of memory bandwidth, as a number of copying threads."""
        used_s = sum(task.cpu_s * task.copying for task in map(self.mean, BUILD_STAGES))
        return used_s / self.period_s if self.period_s else 0.0

    @property
    def most_copying(self) -> float:
        """Use of memory bandwidth by the stage that copies most."""
        return max(task.copying for task in map(self.mean, BUILD_STAGES))

    @property
    def delay_share(self) -> float:
        """Run delay as a share of run delay and CPU time."""
        return _share(self.delayed_s, self.concurrency * self.period_s)

    @property
    def preempted_share(self) -> float:
        """Run delay as a share of run delay and work.

        Work is all computing and waiting of workers and loop in stages, by each of their threads.
        """
        tasks = [self.mean(stage) for stage in (*BUILD_STAGES, *MAIN_STAGES)]
        return _share(self.delayed_s, sum(task.wait_s + task.cpu_s * task.width for task in tasks))

    def mean(self, stage: str) -> Task:
        """Mean task of a stage; empty if the stage did not run."""
        return self._means[stage]

    @cached_property
    def _means(self) -> dict[str, Task]:
        return {stage: self._mean_of(stage) for stage in (*BUILD_STAGES, *MAIN_STAGES)}

    def _mean_of(self, stage: str) -> Task:
        tasks = [
            batch.work.get(stage, NO_TASK) if stage in BUILD_STAGES else getattr(batch, stage) for batch in self.batches
        ]
        if not tasks:
            return NO_TASK
        width = sum(task.cpu_s * task.width for task in tasks) / (sum(task.cpu_s for task in tasks) or 1.0)
        copying = sum(task.cpu_s * task.copying for task in tasks) / (sum(task.cpu_s for task in tasks) or 1.0)
        wait_s, cpu_s, held_s = (
            _mean(times) for times in zip(*((t.wait_s, t.cpu_s, t.held_s) for t in tasks), strict=True)
        )
        return Task(wait_s, cpu_s, width or 1.0, held_s, copying)

    @cached_property
    def concurrency(self) -> float:
        """CPUs in use on average, by workers and loop."""
        stages = (*BUILD_STAGES, *MAIN_STAGES)
        used_s = sum(task.cpu_s * task.width for task in map(self.mean, stages))
        return used_s / self.period_s if self.period_s else 0.0


def files_nbytes_of(recent: Sequence[Sequence[Span]]) -> float:
    """Mean bytes per batch that workers have read from files and pipes.

    Without workers, those of the loop. A worker reads its counter with some of its batches: between two of them, all
    batches count.
    """
    readings = defaultdict[int, list[tuple[int, int]]](list)
    for place, spans in enumerate(recent):
        for stage, before, now, owner in spans:
            if stage == FILES + NBYTES:
                readings[owner].append((place, now - before))
    if len(readings) > 1:
        readings.pop(MAIN, None)
    return sum(
        sum(nbytes for _, nbytes in read[1:]) / (read[-1][0] - read[0][0])
        for read in readings.values()
        if len(read) > 1
    )


@dataclass(slots=True)
class _BatchSpans:
    """Seconds of one batch by stage, on wall and CPU clocks."""

    wall: dict[str, float]
    cpu: dict[str, float]
    delay: dict[int, float]
    worker: int = MAIN
    called_s: float = 0.0
    """Time at which the loop called for the batch."""
    began_s: float = 0.0
    """Time at which its worker began to build it."""
    built_s: float = 0.0
    received_s: float = 0.0
    """Time at which the loop began to unpack it, or had it if there was nothing to unpack."""
    places: int = field(init=False, default=0)
    """Places of a padded batch; 0 if they were not counted."""
    waits: int | None = field(init=False, default=None)
    """Number of waits of its step; None if not read."""
    step_threads_delay_s: float = field(init=False, default=0.0)

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Self:
        wall, cpu, delay = (
            defaultdict[str, float](float),
            defaultdict[str, float](float),
            defaultdict[int, float](float),
        )
        worker = MAIN
        called_ns = built_ns = delivered_ns = received_ns = 0
        began_ns, waits, threads_delay_s = inf, None, 0.0
        for stage, start_ns, stop_ns, owner in spans:
            elapsed_s = (stop_ns - start_ns) / 1e9
            if stage == RUN_DELAY:
                delay[owner] += elapsed_s
            elif stage == STEP_THREADS_DELAY:
                threads_delay_s += elapsed_s
            elif stage == "step" + SWITCHES:
                waits = stop_ns - start_ns
            elif stage.endswith(CPU):
                cpu[stage.removesuffix(CPU)] += elapsed_s
            elif is_wall(stage):
                wall[stage] += elapsed_s
                if stage == "wait":
                    called_ns, delivered_ns = start_ns, stop_ns
                elif stage == "receive":
                    received_ns = start_ns
                elif stage in BUILD_STAGES:
                    worker, began_ns, built_ns = owner, min(began_ns, start_ns), max(built_ns, stop_ns)
        times_s = (each / 1e9 for each in (called_ns, began_ns, built_ns, received_ns or delivered_ns))
        table = cls(dict(wall), dict(cpu), dict(delay), worker, *times_s)
        table.waits, table.step_threads_delay_s = waits, threads_delay_s
        table.places = next((places for stage, _, places, _ in spans if stage == BATCH + PLACES), 0)
        return table

    @property
    def stops(self) -> tuple[int, float] | None:
        """Waits of its step and their seconds; None if not read."""
        if self.waits is None or "step" not in self.cpu:
            return None
        return self.waits, max(self.wall.get("step", 0.0) - self.cpu["step"], 0.0)

    def batch(
        self, ratios: Mapping[str, float], delay: Mapping[int, float], *, has_helpers: bool = False
    ) -> BatchTimes:
        """The tasks of this batch.

        With `has_helpers`, its worker computes in several threads.
        """
        work = {
            stage: self._task(stage, ratios, delay.get(self.worker, 0.0), has_helpers=has_helpers)
            for stage in BUILD_STAGES
            if stage in self.wall
        }
        ours = {stage: self._task(stage, ratios, delay.get(MAIN, 0.0)) for stage in MAIN_STAGES}
        return BatchTimes(work, **ours)

    def _task(self, stage: str, ratios: Mapping[str, float], delay: float, *, has_helpers: bool = False) -> Task:
        wall_s = self.wall.get(stage, 0.0)
        if has_helpers and (width := ratios.get(stage, 0.0) * (1 + delay)) > MULTITHREADED_CPUS:
            # Ready threads, those that wait for a CPU included: where CPUs are short, few of them run at once.
            return Task(0.0, wall_s / (1 + delay), min(width, _WIDEST))
        if stage in self.cpu:
            return _task(wall_s, self.cpu[stage], delay)
        return _task(wall_s, ratios[stage] * wall_s if stage in ratios else None, delay)


def _task(wall_s: float, cpu_s: float | None, delay: float) -> Task:
    """Task of a span; without a CPU time, all of it computes."""
    if cpu_s is None:
        return Task(0.0, wall_s / (1 + delay))
    if cpu_s > MULTITHREADED_CPUS * wall_s:
        return Task(0.0, wall_s / (1 + delay), min(cpu_s / wall_s, _WIDEST)) if wall_s else NO_TASK
    if cpu_s * (1 + delay) < _COMPUTES * wall_s or cpu_s < _HARDLY_COMPUTES * wall_s:
        delay = 0.0
    wait_s = wall_s - cpu_s * (1 + delay)
    return Task(wait_s if delay else max(wait_s, 0.0), min(cpu_s, wall_s))


def _without_debts(batches: Sequence[BatchTimes]) -> tuple[BatchTimes, ...]:
    """The batches, with no waiting below zero and the same mean waiting.

    A batch with less than the mean run delay seems to wait for less than nothing. Those with more would seem to wait,
    if it was not taken from their waiting.
    """
    waits = defaultdict[str, list[float]](list)
    for batch in batches:
        for stage, task in _stages(batch).items():
            waits[stage].append(task.wait_s)
    left = {
        stage: max(sum(each), 0.0) / (sum(max(wait_s, 0.0) for wait_s in each) or 1.0) for stage, each in waits.items()
    }

    def paid(stage: str, task: Task) -> Task:
        return task._replace(wait_s=left[stage] * max(task.wait_s, 0.0))

    def changed(batch: BatchTimes) -> BatchTimes:
        tasks = {stage: paid(stage, task) for stage, task in _stages(batch).items()}
        work = {stage: tasks.pop(stage) for stage in batch.work}
        return BatchTimes(work, **tasks)

    return tuple(map(changed, batches))


def _with_long_steps(batches: Sequence[BatchTimes], least_s: Sequence[float]) -> tuple[BatchTimes, ...]:
    """The batches, with steps of at least `least_s`.

    The run delay of a step is not all of its waiting.
    """
    missing_s = (least - batch.step.alone_s for batch, least in zip(batches, least_s, strict=True))
    return tuple(batch.with_longer_step(max(more, 0.0)) for batch, more in zip(batches, missing_s, strict=True))


def _with_turns(batches: tuple[BatchTimes, ...], tables: Sequence[_BatchSpans], ahead: int) -> tuple[BatchTimes, ...]:
    """The batches, with the mean time from a request to its begin.

    The worker still frees the memory of its last batch, receives the request, or waits for a CPU. The time that it
    takes for an earlier request does not count. A batch is drawn and requested when the loop calls for the batch
    `ahead` places before it; with 0, workers take no such time.
    """
    idle_s = dict[int, float]()
    turns = list[float]()
    for number, table in enumerate(tables):
        if number >= ahead > 0 and table.worker in idle_s:
            asked = tables[number - ahead]
            ready_s = max(idle_s[table.worker], asked.called_s + asked.wall.get("sample", 0.0))
            turns.append(max(table.began_s - ready_s, 0.0))
        idle_s[table.worker] = table.built_s
    if not turns:
        return batches
    turn = Task(wait_s=_mean(turns))
    return tuple(replace(batch, work={TURN: turn, **batch.work}) for batch in batches)


def _padded_steps(tables: Sequence[_BatchSpans]) -> Iterator[tuple[int, float]]:
    """Places of padded batches, with the steps on them.

    A step is recorded with the next batch.
    """
    for before, after in pairwise(tables):
        if before.places and "step" in after.wall:
            yield before.places, after.wall["step"]


def _take_starts(tables: Sequence[_BatchSpans]) -> float:
    """Take the starts of further workers out of the waits.

    Returns their sum. The loop waits for them with the first batch of each worker, until the worker begins to build it.
    """
    if "step" in tables[0].wall:  # the beginning of the epoch is too long ago
        return 0.0
    begun, starts_s = {tables[0].worker}, 0.0
    for table in tables:
        if table.worker not in begun:
            begun.add(table.worker)
            start_s = min(max(table.began_s - table.called_s, 0.0), table.wall.get("wait", 0.0))
            table.wall["wait"] = table.wall.get("wait", 0.0) - start_s
            starts_s += start_s
    return starts_s


def _listing_s(stats: Stats) -> float:
    """Time of the longest draw beyond a usual one: the first."""
    draws = stats.stages.get("sample")
    return 0.0 if draws is None else max(min(draws.max_s, stats.startup_s) - draws.median_s, 0.0)


def _delivery_s(tables: Sequence[_BatchSpans]) -> float | None:
    """Mean time from building to unpacking, where the loop has waited."""
    times = [max(table.received_s - table.built_s, 0.0) for table in tables if 0 < table.called_s < table.built_s]
    return _mean(times) if times else None


def _stages(batch: BatchTimes) -> dict[str, Task]:
    return {**batch.work, **{stage: getattr(batch, stage) for stage in MAIN_STAGES}}


_HARDLY_COMPUTES = 0.05
"""Share of computing below which a delay comes from late wake-ups, not from sharing CPUs."""


_COMPUTES = 0.3
"""Share of computing and delay below which a delay comes from wake-ups, and overlaps as waiting does."""


def _cpu_ratios(tables: Iterable[_BatchSpans]) -> dict[str, float]:
    """CPU seconds per second of each stage, where both were measured."""
    wall, cpu = defaultdict[str, float](float), defaultdict[str, float](float)
    for table in tables:
        for stage, seconds in table.cpu.items():
            wall[stage] += table.wall.get(stage, 0.0)
            cpu[stage] += seconds
    return {stage: cpu[stage] / wall[stage] for stage in cpu if wall[stage]}


def _ratios_of_totals(stats: Stats) -> dict[str, float]:
    """CPU seconds per second of each stage, over all batches."""
    known = {stage: (times.cpu_s, times.total_s) for stage, times in stats.stages.items()}
    known["step"] = stats.step_cpu_s, stats.step_s
    return {stage: cpu_s / total_s for stage, (cpu_s, total_s) in known.items() if cpu_s is not None and total_s}


def _helped_shares(tables: Sequence[_BatchSpans], ratios: Mapping[str, float]) -> dict[int, float]:
    """Share of helper threads in the CPU time of each worker."""
    helped, cpu = defaultdict[int, float](float), defaultdict[int, float](float)
    for table in tables:
        helped[table.worker] += table.cpu.get(HELPERS, 0.0)
        for stage in BUILD_STAGES:
            wall_s = table.wall.get(stage, 0.0)
            cpu[table.worker] += table.cpu.get(stage, ratios.get(stage, 0.0) * wall_s)
    return {worker: min(seconds / cpu[worker], 1.0) for worker, seconds in helped.items() if cpu[worker]}


HELPED = 0.1
"""Share of helper threads in the CPU time of a worker above which it counts as one of several threads."""


def _delays(tables: Sequence[_BatchSpans]) -> dict[int, float]:
    """Run delay per CPU second, by worker.

    A worker's delay may have been read with other batches than its CPU time: only sums over many batches are compared.
    """
    ratios = _cpu_ratios(tables)
    delay, cpu = defaultdict[int, float](float), defaultdict[int, float](float)
    for table in tables:
        for worker, seconds in table.delay.items():
            delay[worker] += seconds
        for stage, seconds in table.wall.items():
            if stage in BUILD_STAGES or stage in MAIN_STAGES:
                owner = table.worker if stage in BUILD_STAGES else MAIN
                cpu[owner] += table.cpu.get(stage, min(ratios.get(stage, 1.0), 1.0) * seconds)
    # CPU times of stages without a CPU clock contain their delay.
    return {worker: seconds / max(cpu[worker], seconds / _MOST_DELAY) for worker, seconds in delay.items() if seconds}


def _late_s(tables: Sequence[_BatchSpans], batches: Sequence[BatchTimes]) -> float:
    """Mean run delay of the loop that no stage has lost."""
    delayed_s: float = sum(table.delay.get(MAIN, 0.0) for table in tables)
    elapsed_s = sum(table.wall.get(stage, 0.0) for table in tables for stage in MAIN_STAGES)
    taken_s: float = elapsed_s - sum(getattr(batch, stage).alone_s for batch in batches for stage in MAIN_STAGES)
    return max(delayed_s - taken_s, 0.0) / len(tables)


_MOST_DELAY = 100.0


_WIDEST = 1024.0
"""CPUs of the largest machines. It bounds ratios: for the shortest spans, clocks of different resolution give any
value.
"""


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part > 0 else 0.0


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
