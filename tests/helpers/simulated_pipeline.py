"""A loop, its workers and a machine, simulated tick by tick: spans with a known cause.

It shares no code with the model under test. In each tick, some of the processes that are ready to run get a
CPU; every process waits, computes, or is ready without a CPU.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache

from feedline.core.telemetry import MAIN, Span
from feedline.loader.report import Context, Stats, Totals
from feedline.workers.registry import INLINE, PROCESSES, THREADS

TICK_MS = 0.25

INTERVAL_MS = 5.0
"""Time for which a thread keeps Python's lock while others wait for it."""

Part = tuple[str, float, float]
"""Stage, milliseconds of waiting, milliseconds of computing."""


@dataclass(frozen=True)
class Pipeline:
    """Times in milliseconds, each as (waiting, computing)."""

    fetch: tuple[float, float] = (0, 0)
    collate: tuple[float, float] = (0, 0)
    serialize: tuple[float, float] = (0, 0)
    turn: float = 0
    """Computing of a worker between two batches, outside of all stages."""
    receive: float = 0
    sample: float = 0
    step: tuple[float, float] = (5, 0)
    slow: Callable[[int], float] = lambda number: 1.0
    """Factor on the fetch of a batch."""
    workers: int = 0
    prefetch: int = 2
    in_order: bool = True
    method: str = "process"
    cpus: int = 2
    others: int = 0
    """Programs that always compute."""
    locks: bool = False
    """Threads compute only one at a time; one that computes keeps the lock for `INTERVAL_MS`."""
    slice_ms: float = 0
    """Time for which a task that computes keeps its CPU while others are ready."""
    batches: int = 120
    samples: int = 8

    def context(self, **known: object) -> Context:
        kind = {"process": PROCESSES, "thread": THREADS}[self.method] if self.workers else INLINE
        round_robin = self.method == "process" and self.workers > 0
        return replace(
            Context(
                dataset="Photos", pool=kind, num_workers=self.workers, prefetch_factor=self.prefetch,
                in_order=self.in_order, round_robin=round_robin, cpus=self.cpus, epoch_batches=10_000,
            ),
            **known,  # type: ignore[arg-type]
        )  # fmt: skip

    def run(self) -> Run:
        """A run, whose recorded spans the caller may change."""
        run = copy(_run(self))
        run.recorded = [list(spans) for spans in run.recorded]
        return run


@cache
def _run(pipeline: Pipeline) -> Run:
    return Run(pipeline)


@dataclass(eq=False)
class Process:
    """Its remaining work, and the use of its time."""

    worker: int
    wait: float = 0.0
    compute: float = 0.0
    cpu: float = 0.0
    delay: float = 0.0


@dataclass(eq=False)
class Job:
    number: int
    spans: list[Span] = field(default_factory=list)


class Run:
    """A whole epoch; `spans` are as the engine records them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.now = 0.0
        self.turn = 0
        self.loop = Process(MAIN)
        self.workers = [Process(number) for number in range(pipeline.workers)]
        self.programs = {id(self.loop): self.loop_program()}
        self.queues: list[deque[Job]] = [deque() for _ in self.workers] or [deque()]
        self.programs |= {id(each): self.worker_program(each) for each in self.workers}
        self.ready: deque[Job] = deque()
        self.recorded: list[list[Span]] = []
        self.ended = False
        self.random = random.Random(1)
        self.holder: Process | None = None
        self.held = 0.0
        self.slices = dict[int, float]()
        for process in [*self.workers, self.loop]:
            self.advance(process)
        while not self.ended:
            self.tick()
        self.programs.clear()

    def tick(self) -> None:
        everyone = [self.loop, *self.workers]
        runnable = [each for each in everyone if each.wait <= 0 and each.compute > 0]
        for each in everyone:
            if each.wait > 0:
                each.wait -= TICK_MS
        running = self.chosen(runnable)
        for each in runnable:
            if each in running:
                each.compute -= TICK_MS
                each.cpu += TICK_MS
            elif not self.pipeline.locks:  # a wait for a lock is no run delay
                each.delay += TICK_MS
        self.now += TICK_MS
        for each in everyone:
            if each.wait <= 1e-9 and each.compute <= 1e-9:
                self.advance(each)

    def chosen(self, runnable: list[Process]) -> list[Process]:
        """The tasks that get a CPU in this tick, each with the same chance."""
        if self.pipeline.locks:
            runnable = runnable and [self.holder_of_lock(runnable)]
        crowd = [*runnable, *[None] * self.pipeline.others]
        self.random.shuffle(crowd)
        crowd.sort(key=lambda each: self.slices.get(id(each), 0.0) <= 0)
        chosen = [each for each in crowd[: self.pipeline.cpus] if each is not None]
        left = {id(each): self.slices.get(id(each), 0.0) for each in chosen}
        self.slices = {each: (ms if ms > 0 else self.pipeline.slice_ms) - TICK_MS for each, ms in left.items()}
        return chosen

    def holder_of_lock(self, runnable: list[Process]) -> Process:
        """The thread that computes: the same one until it waits, or others have waited for a whole interval."""
        if self.holder not in runnable or (self.held >= INTERVAL_MS and len(runnable) > 1):
            self.holder = self.random.choice([each for each in runnable if each is not self.holder])
            self.held = 0.0
        self.held = self.held + TICK_MS if len(runnable) > 1 else 0.0  # as long as another waits for it
        assert self.holder is not None
        return self.holder

    def probe(self, process: Process, spans: list[Span]):
        """Record how long a thread waits for the lock that it has given back."""
        start, self.holder, self.held = self.now, process, INTERVAL_MS
        yield 0, TICK_MS
        spans.append(Span("lock", ns(start), ns(self.now - TICK_MS), process.worker))

    def advance(self, process: Process) -> None:
        program = self.programs[id(process)]
        part = next(program, None)
        while part == (0, 0):
            part = next(program, None)
        if part is not None:
            process.wait, process.compute = part

    def stage(self, process: Process, name: str, wait: float, compute: float, spans: list[Span]):
        """Run one stage in four parts, as samples do, and record it."""
        start, cpu = self.now, process.cpu
        takes_lock = self.pipeline.locks and process is self.loop
        for _ in range(4):
            yield wait / 4, 0
            yield 0, max(compute / 4, TICK_MS if wait and takes_lock else 0)
        spans.append(Span(name, ns(start), ns(self.now), process.worker))
        if name in ("fetch", "collate", "step"):
            spans.append(Span(name + ".cpu", ns(cpu), ns(process.cpu), process.worker))

    def build(self, process: Process, job: Job):
        pipeline, factor = self.pipeline, self.pipeline.slow(job.number)
        wait, compute = pipeline.fetch
        delay = process.delay
        yield from self.stage(process, "fetch", wait * factor, compute * factor, job.spans)
        yield from self.stage(process, "collate", *pipeline.collate, job.spans)
        if self.workers and pipeline.method == "process":
            yield from self.stage(process, "serialize", *pipeline.serialize, job.spans)
        if pipeline.locks and job.number % 16 == 15:
            yield from self.probe(process, job.spans)
        job.spans.append(Span("run_delay", ns(delay), ns(process.delay), process.worker))

    def worker_program(self, process: Process):
        round_robin = self.pipeline.method == "process"
        queue = self.queues[process.worker if round_robin else 0]
        while True:
            if not queue:
                yield TICK_MS, 0
                continue
            job = queue.popleft()
            yield from self.build(process, job)
            self.ready.append(job)
            yield 0, self.pipeline.turn

    def loop_program(self):
        pipeline = self.pipeline
        window: list[Job] = []
        done: list[Job] = []
        drawn, left, step_spans = 0, self.now, list[Span]()
        ahead = pipeline.prefetch * pipeline.workers
        delay = 0.0
        for _ in range(pipeline.batches):
            called, sampled = self.now, 0.0
            while len(window) <= ahead and drawn < pipeline.batches:
                job, start = Job(drawn), self.now
                yield 0, pipeline.sample
                sampled += self.now - start
                window.append(job)
                self.queues[drawn % len(self.queues) if pipeline.method == "process" else 0].append(job)
                drawn += 1
            if not self.workers:
                yield from self.build(self.loop, window[0])
                done.append(window[0])
            while not (window[0] in done if pipeline.in_order else any(job in done for job in window)):
                if not self.ready:
                    yield TICK_MS, 0
                    continue
                job, start = self.ready.popleft(), self.now
                yield 0, pipeline.receive
                job.spans.append(Span("receive", ns(start), ns(self.now), MAIN))
                done.append(job)
            job = window[0] if pipeline.in_order else next(job for job in window if job in done)
            window.remove(job)
            done.remove(job)
            spans = [*job.spans, *step_spans, Span("step", ns(left), ns(called), MAIN)]
            spans += [Span("wait", ns(called), ns(self.now), MAIN), Span("sample", 0, ns(sampled), MAIN)]
            if not any(span.stage == "run_delay" and span.worker == MAIN for span in spans):
                spans.append(Span("run_delay", ns(delay), ns(self.loop.delay), MAIN))
            delay = self.loop.delay
            if pipeline.locks and len(self.recorded) % 16 == 15:
                yield from self.probe(self.loop, spans)
            self.recorded.append(spans)
            left, step_spans = self.now, []
            step = list[Span]()
            yield from self.stage(self.loop, "step", *pipeline.step, step)
            step_spans = [
                *step[1:],
                Span("step.switches", 0, (12 if pipeline.locks else 4) * (pipeline.step[0] > 0), MAIN),
            ]
        self.ended = True

    def totals(self) -> Totals:
        totals = Totals()
        for spans in self.recorded:
            totals.add(spans, self.pipeline.samples)
        return totals

    @property
    def stats(self) -> Stats:
        return self.totals().stats()

    @property
    def recent(self) -> list[list[Span]]:
        return [list(spans) for spans in self.totals().recent]

    @property
    def period_s(self) -> float:
        """Seconds from batch to batch, once the window is full."""
        waits = [span for spans in self.recorded for span in spans if span.stage == "wait"]
        first = min(2 * self.pipeline.workers + 2, len(waits) // 2)
        return (waits[-1].stop_ns - waits[first].stop_ns) / 1e9 / (len(waits) - 1 - first)


def ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
