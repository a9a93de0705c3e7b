"""Sums over the spans of many batches, cheap enough to be kept always."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from feedline.store_counts import Statistics
from feedline.telemetry import MAIN, Span, Timed

RECENT = 256
"""Batches whose spans are kept, for medians and exporters."""

_LOOP = ("wait", "step")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """How long one stage took."""

    count: int
    """How often it was timed: once per batch, more often where a batch is built in parts."""
    total_s: float
    """Summed over all workers, so it may exceed the wall time."""
    median_s: float
    """Of the recent times."""
    max_s: float
    workers: tuple[int, ...]
    """Where it ran; -1 is the training process itself."""

    @property
    def mean_s(self) -> float:
        """Seconds each time."""
        return self.total_s / self.count if self.count else 0.0

    @property
    def in_workers(self) -> bool:
        """Whether it ran on workers, not in the training process alone."""
        return self.workers[-1:] > (MAIN,)


@dataclass(frozen=True, slots=True)
class Stats:
    """What a loader has done since its iteration began: what `loader.stats()` returns."""

    batches: int = 0
    """Batches that the loop has received."""
    samples: int = 0
    """Samples in them; 0 where their number is not known."""
    wall_s: float = 0.0
    """Seconds that the loop spent waiting and computing; `wait_s + step_s`."""
    wait_s: float = 0.0
    """Seconds of it in which the loop waited for a batch."""
    startup_s: float = 0.0
    """Seconds of `wait_s` that were spent on the first batch."""
    step_s: float = 0.0
    """Seconds that the loop itself took between batches."""
    stages: Mapping[str, StageTimes] = field(default_factory=dict)
    """The times of "sample", "fetch", "collate", "encode", "decode" and other stages, as far as they ran."""
    in_flight_nbytes: int = 0
    """Bytes of batches that are on their way, or still kept by the loop."""
    arena_nbytes: int = 0
    """Bytes of transport memory that the workers hold."""
    copied_nbytes: int = 0
    """Bytes copied to the device, or to page-locked memory."""
    staged_nbytes: int = 0
    """Those of them that were copied once more on the host, because they did not lie in page-locked memory."""
    copy_s: float = 0.0
    """Seconds that the device spent on copies."""
    restarts: int = 0
    """Workers that died and were replaced."""
    skipped: int = 0
    """Samples that failed and were left out or replaced."""
    workers: int = 0
    """Workers that are alive."""
    stores: Statistics = field(default_factory=Statistics)
    """Requests, retries, bytes and cache hits of all stores of this process and its workers meanwhile."""

    @property
    def samples_per_s(self) -> float:
        """Samples that the loop received per second of wall time."""
        return self.samples / self.wall_s if self.wall_s else 0.0

    @property
    def batches_per_s(self) -> float:
        """Batches that the loop received per second of wall time."""
        return self.batches / self.wall_s if self.wall_s else 0.0

    @property
    def wait_share(self) -> float:
        """The share of the wall time in which the loop waited, 0 to 1."""
        return self.wait_s / self.wall_s if self.wall_s else 0.0


class Totals:
    """Count, sum and maximum of every stage on every worker. One thread adds; any thread may read."""

    def __init__(self, recent: int = RECENT) -> None:
        self._cells: dict[tuple[str, int], list[int]] = {}
        self._recent: deque[Sequence[Timed]] = deque(maxlen=recent)
        self._startup_ns = 0
        self.batches = 0
        self.samples = 0

    def add(self, spans: Sequence[Timed], samples: int = 0) -> None:
        """Count one delivered batch; `spans` is kept for a while and must not change."""
        if not self.batches:
            spans = self._begun(spans)
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
        """The totals so far. What others know (bytes, workers, skips) is put in with `dataclasses.replace`."""
        stages = self.stages()
        wait_s, step_s = (stages[stage].total_s if stage in stages else 0.0 for stage in _LOOP)
        return Stats(
            batches=self.batches,
            samples=self.samples,
            wall_s=wait_s + step_s,
            wait_s=wait_s,
            startup_s=self._startup_ns / 1e9,
            step_s=step_s,
            stages={stage: times for stage, times in stages.items() if stage not in _LOOP},
        )

    def stages(self) -> dict[str, StageTimes]:
        """The times of each stage over all workers, "wait" and "step" included."""
        cells: dict[str, list[tuple[int, list[int]]]] = {}
        for (stage, worker), cell in list(self._cells.copy().items()):
            cells.setdefault(stage, []).append((worker, cell))
        recent = _elapsed_ns(self._recent.copy())
        return {stage: _times(found, recent.get(stage, ())) for stage, found in cells.items()}

    def _begun(self, spans: Sequence[Timed]) -> Sequence[Timed]:
        """The first batch: its wait is the start-up, and no step of the loop has gone before it."""
        self._startup_ns = sum(stop_ns - start_ns for stage, start_ns, stop_ns, _ in spans if stage == "wait")
        return [timed for timed in spans if timed[0] != "step"]


def _elapsed_ns(batches: Iterable[Sequence[Timed]]) -> dict[str, list[int]]:
    elapsed: dict[str, list[int]] = {}
    for spans in batches:
        for stage, start_ns, stop_ns, _ in spans:
            elapsed.setdefault(stage, []).append(stop_ns - start_ns)
    return elapsed


def _times(cells: list[tuple[int, list[int]]], recent_ns: Sequence[int]) -> StageTimes:
    return StageTimes(
        count=sum(count for _, (count, _, _) in cells),
        total_s=sum(total for _, (_, total, _) in cells) / 1e9,
        median_s=(median(recent_ns) if recent_ns else 0) / 1e9,
        max_s=max(longest for _, (_, _, longest) in cells) / 1e9,
        workers=tuple(sorted(worker for worker, _ in cells)),
    )
