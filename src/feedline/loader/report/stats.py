"""Statistics of a loader: totals of spans, derived figures, formatting.

Adding a span is cheap, so totals are always kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from feedline.core.store_metrics import StoreStatistics
from feedline.core.telemetry import CPU, MAIN, RUN_DELAY, Span, SpanTuple
from feedline.workers.base import PoolKind
from feedline.workers.registry import INLINE

RECENT = 256
"""Number of latest batches whose spans are kept, for medians and exporters."""


_LOOP = ("wait", "step")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of one stage."""

    count: int
    """Number of spans: one per batch, more where a batch is built in parts."""
    total_s: float
    """Sum over all workers; may exceed the wall time."""
    median_s: float
    """Median of the recent spans."""
    max_s: float
    workers: tuple[int, ...]
    """Numbers of the workers it ran on; -1 is the training process."""
    cpu_s: float | None = None
    """Seconds of `total_s` on a CPU, estimated from the spans whose CPU time was measured; None if none was."""

    @property
    def mean_s(self) -> float:
        """Mean seconds per span."""
        return self.total_s / self.count if self.count else 0.0

    @property
    def in_workers(self) -> bool:
        """True if the stage ran on workers."""
        return self.workers[-1:] > (MAIN,)


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of the current iteration, returned by `loader.stats()`."""

    batches: int = 0
    """Batches received by the loop."""
    samples: int = 0
    """Samples in them; 0 where their number is unknown."""
    wall_s: float = 0.0
    """Seconds of waiting and computing, `wait_s + step_s`."""
    wait_s: float = 0.0
    """Seconds the loop waited for batches."""
    startup_s: float = 0.0
    """Seconds of `wait_s` before the first batch."""
    step_s: float = 0.0
    """Seconds of the loop's own work between batches."""
    step_cpu_s: float | None = None
    """CPU seconds of it; may exceed `step_s` where several threads compute. None if not measured."""
    run_delay_s: float = 0.0
    """Seconds in which the loop or a worker was ready to run, but other programs had the CPUs."""
    stages: Mapping[str, StageTimes] = field(default_factory=dict)
    """Times of the stages that ran: "sample", "fetch", "collate", "encode", "decode" and others."""
    in_flight_nbytes: int = 0
    """Bytes of batches in flight, or still held by the loop."""
    arena_nbytes: int = 0
    """Bytes of transport memory of the workers."""
    copied_nbytes: int = 0
    """Bytes copied to the device, or to page-locked memory."""
    staged_nbytes: int = 0
    """Bytes of them first copied on the host, because they were not in page-locked memory."""
    copy_s: float = 0.0
    """Seconds the device spent on copies."""
    hidden_copy_s: float = 0.0
    """Part of `copy_s` in which the loop did not wait for them."""
    decoded_on_device: int = 0
    """Images of `DecodeOnDevice` that an accelerator was to decode, in this process."""
    decode_fallbacks: int = 0
    """Those of them that the CPU had to decode."""
    restarts: int = 0
    """Workers that died and were replaced."""
    skipped: int = 0
    """Samples that failed and were left out or replaced."""
    workers: int = 0
    """Live workers."""
    stores: StoreStatistics = field(default_factory=StoreStatistics)
    """Requests, retries, bytes and cache hits of all stores of this process and its workers."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second of wall time."""
        return self.samples / self.wall_s if self.wall_s else 0.0

    @property
    def batches_per_s(self) -> float:
        """Batches per second of wall time."""
        return self.batches / self.wall_s if self.wall_s else 0.0

    @property
    def wait_share(self) -> float:
        """Waiting time as a share of the wall time, 0 to 1."""
        return self.wait_s / self.wall_s if self.wall_s else 0.0


class Totals:
    """Count, sum and maximum of spans, by stage and worker.

    One thread adds; any thread may read.
    """

    def __init__(self, recent: int = RECENT) -> None:
        self._cells: dict[tuple[str, int], list[int]] = {}
        self._recent: deque[Sequence[SpanTuple]] = deque(maxlen=recent)
        self._startup_ns = 0
        self.batches = 0
        self.samples = 0

    def add(self, spans: Sequence[SpanTuple], samples: int = 0) -> None:
        """Count one delivered batch; `spans` is kept and must not change."""
        if not self.batches:
            spans = self._begin(spans)
        cells = self._cells
        for stage, start_ns, stop_ns, worker in spans:
            elapsed_ns = stop_ns - start_ns
            try:
                cell = cells[stage, worker]
            except KeyError:
                cells[stage, worker] = [1, elapsed_ns, elapsed_ns]
                continue
            cell[0] += 1
            cell[1] += elapsed_ns
            if elapsed_ns > cell[2]:  # noqa: PLR1730 - a call of `max` would double the cost of a span
                cell[2] = elapsed_ns
        self._recent.append(spans)
        self.batches += 1
        self.samples += samples

    @property
    def recent(self) -> list[Sequence[Span]]:
        """The spans of the last batches, oldest first."""
        return [[Span(*timed) for timed in spans] for spans in self._recent.copy()]

    def stats(self) -> Stats:
        """The totals so far.

        Bytes, workers and skips are 0: their owners set them by `dataclasses.replace`.
        """
        stages = self.stages()
        wait_s, step_s = (stages[stage].total_s if stage in stages else 0.0 for stage in _LOOP)
        return Stats(
            batches=self.batches,
            samples=self.samples,
            wall_s=wait_s + step_s,
            wait_s=wait_s,
            startup_s=self._startup_ns / 1e9,
            step_s=step_s,
            step_cpu_s=stages["step"].cpu_s if "step" in stages else None,
            run_delay_s=sum(cell[1] for (stage, _), cell in list(self._cells.copy().items()) if stage == RUN_DELAY)
            / 1e9,
            stages={stage: times for stage, times in stages.items() if stage not in _LOOP},
        )

    def stages(self) -> dict[str, StageTimes]:
        """The times of each stage over all workers, including "wait" and "step"."""
        cells: dict[str, list[tuple[int, list[int]]]] = {}
        for (stage, worker), cell in list(self._cells.copy().items()):
            cells.setdefault(stage, []).append((worker, cell))
        recent = _elapsed_ns(self._recent.copy())
        return {
            stage: _times(parts, recent.get(stage, ()), cells.get(stage + CPU, ()))
            for stage, parts in cells.items()
            if is_wall(stage)
        }

    def _begin(self, spans: Sequence[SpanTuple]) -> Sequence[SpanTuple]:
        """Count the wait for the first batch as start-up time.

        Its step is dropped: no step of the loop precedes the first batch.
        """
        self._startup_ns = sum(stop_ns - start_ns for stage, start_ns, stop_ns, _ in spans if stage == "wait")
        return [timed for timed in spans if timed[0] != "step"]


def is_wall(stage: str) -> bool:
    """True for stages on the wall clock."""
    return stage != RUN_DELAY and not stage.endswith(CPU)


def _elapsed_ns(batches: Iterable[Sequence[SpanTuple]]) -> dict[str, list[int]]:
    elapsed: dict[str, list[int]] = {}
    for spans in batches:
        for stage, start_ns, stop_ns, _ in spans:
            elapsed.setdefault(stage, []).append(stop_ns - start_ns)
    return elapsed


def _times(
    cells: list[tuple[int, list[int]]], recent_ns: Sequence[int], cpu_cells: Sequence[tuple[int, list[int]]]
) -> StageTimes:
    count, total_ns = sum(count for _, (count, _, _) in cells), sum(total for _, (_, total, _) in cells)
    # CPU times are measured for a part of the spans: those of short batches are left out, but they all compute alike.
    measured = sum(count for _, (count, _, _) in cpu_cells)
    cpu_ns = sum(total for _, (_, total, _) in cpu_cells)
    return StageTimes(
        count=count,
        total_s=total_ns / 1e9,
        median_s=(median(recent_ns) if recent_ns else 0) / 1e9,
        max_s=max(longest for _, (_, _, longest) in cells) / 1e9,
        workers=tuple(sorted(worker for worker, _ in cells)),
        cpu_s=cpu_ns / 1e9 * count / measured if measured else None,
    )


@dataclass(frozen=True, slots=True)
class Context:
    """Setup of the loader, for the advice of a verdict."""

    dataset: str = "the dataset"
    """Its class name."""
    pool: PoolKind = INLINE
    """The kind of pool that builds the batches."""
    num_workers: int = 0
    prefetch_factor: int = 2
    cpus: int = 1
    """CPUs available to this process."""
    many_at_once: bool = False
    """True if the dataset returns many samples per call (`__getitems__`, `read_batch`)."""
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures derived from the totals, per batch or as shares.

    Shares lie between 0 and 1. Where totals are zero, so are the figures.
    """

    stats: Stats
    context: Context

    @property
    def later(self) -> int:
        """Number of batches after the first, whose wait counts as start-up."""
        return max(self.stats.batches - 1, 0)

    @property
    def step_s(self) -> float:
        """Seconds of the loop's own work per batch."""
        return _each(self.stats.step_s, self.later)

    @property
    def period_s(self) -> float:
        """Seconds from batch to batch, after the first."""
        return _each(self.stats.wall_s - self.stats.startup_s, self.later)

    @property
    def later_wait_share(self) -> float:
        """Waiting time as a share of the time after the first batch."""
        return _share(self.stats.wait_s - self.stats.startup_s, self.stats.wall_s - self.stats.startup_s)

    @property
    def work_s(self) -> float:
        """Seconds to build one batch, wherever it is built."""
        return _each(sum(times.total_s for times in self._building()), self.stats.batches)

    @property
    def main_s(self) -> float:
        """Seconds per batch of the training process for receiving; 0 without workers."""
        ours = (times.total_s for times in self.stats.stages.values() if not times.in_workers)
        return 0.0 if self.inline else _each(sum(ours), self.stats.batches)

    @property
    def inline(self) -> bool:
        """True if the training process builds the batches itself."""
        return not any(times.in_workers for times in self.stats.stages.values())

    @property
    def workers(self) -> int:
        """Number of workers: `num_workers`, or those seen at work if more."""
        seen = {worker for times in self.stats.stages.values() for worker in times.workers if worker >= 0}
        return 0 if self.inline else max(self.context.num_workers, len(seen), 1)

    @property
    def busy_share(self) -> float:
        """Share of the workers' time spent on delivered batches."""
        return min(1.0, _share(self.work_s, self.workers * self.period_s))

    @property
    def copying_share(self) -> float:
        """Copying time of the device as a share of the wall time."""
        return _share(self.stats.copy_s, self.stats.wall_s)

    @property
    def needed(self) -> int:
        """Workers needed to keep up with the loop; 0 if none suffice."""
        return math.ceil(min(self.work_s / self.step_s, 1e9)) if self.step_s > 0 else 0

    @property
    def samples_each(self) -> float:
        """Samples per batch; 0 where their number is unknown."""
        return _each(self.stats.samples, self.stats.batches)

    @property
    def main_stage(self) -> str:
        """The stage of receiving with the most time in the training process."""
        return max(
            (name for name, times in self.stats.stages.items() if not times.in_workers),
            key=lambda name: self.stats.stages[name].total_s,
            default="decode",
        )

    @property
    def building_stage(self) -> str:
        """The stage with the most time in building batches."""
        stages = self.stats.stages
        names = [name for name, times in stages.items() if self.inline or times.in_workers]
        return max(names, key=lambda name: stages[name].total_s, default="fetch")

    def share_of_work(self, stage: str) -> float:
        """Time of one stage as a share of building a batch."""
        return _share(self.each_s(stage), self.work_s)

    def each_s(self, stage: str) -> float:
        """Seconds per batch of one stage."""
        times = self.stats.stages.get(stage)
        return _each(times.total_s, self.stats.batches) if times is not None else 0.0

    def _building(self) -> list[StageTimes]:
        return [times for times in self.stats.stages.values() if self.inline or times.in_workers]


def _each(total: float, number: int) -> float:
    return max(total, 0.0) / number if number else 0.0


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0


_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def seconds(value: float) -> str:
    """A duration with its unit: "1.2 s", "80 ms", "350 µs"."""
    for unit, name in _UNITS:
        if value >= 0.995 * unit:
            return f"{_digits(value / unit)} {name}"
    return "0 s" if value <= 0 else "under 1 µs"


def share(value: float) -> str:
    """A share in percent; below 10 % with one decimal."""
    percent = 100 * value
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def size(nbytes: float) -> str:
    """Bytes in the largest unit of which there is at least one."""
    for unit, name in _SIZES:
        if nbytes >= unit:
            return f"{_digits(nbytes / unit)} {name}"
    return f"{nbytes:.0f} bytes"


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 worker", "2,000 workers", "no worker"."""
    if number == 1:
        return f"1 {noun}"
    if not number:
        return f"no {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
