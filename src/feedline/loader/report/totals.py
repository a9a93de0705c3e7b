"""Sums of spans, by stage and worker.

Adding a batch is an append; sums are formed for many batches at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from feedline.core.histogram import Histogram
from feedline.core.telemetry import CPU, RUN_DELAY, Span, SpanTuple
from feedline.loader.report.stats import LOOP, SlowBatch, StageTimes, Stats, is_wall

RECENT = 256
"""Number of latest batches whose spans are kept, for medians and exporters."""


SLOWEST = 8
"""Number of slowest batches that are kept."""


_MOST_PENDING = 128
"""Batches after which sums are formed, whether or not they are asked for: they hold memory until then."""


class RecentBatch(NamedTuple):
    """Spans of a delivered batch, with its place in the epoch."""

    spans: Sequence[SpanTuple]
    epoch: int
    number: int


_Delivered = tuple["Totals", Sequence[SpanTuple], int, Any]
"""Totals, spans, number of samples and request of a batch; a plain tuple, as one is made for every batch."""


@dataclass(slots=True)
class _StageSums:
    count: int
    total_ns: int
    max_ns: int
    histogram: Histogram


class Totals:
    """Count, sum, maximum and histogram of spans, by stage and worker.

    One thread adds; any thread may read, and waits only for sums that are being formed, never for a batch. What is
    added also counts in `whole`, the totals of all epochs.
    """

    def __init__(self, recent: int = RECENT, whole: Totals | None = None) -> None:
        self._cells: dict[tuple[str, int], _StageSums] = {}
        # Shared by the totals of all epochs: batches of an iteration that has been dropped are not lost.
        self._pending: list[_Delivered] = [] if whole is None else whole._pending
        self._recent: deque[tuple[Sequence[SpanTuple], Any]] = deque(maxlen=recent)
        self._slowest: list[SlowBatch] = []
        self._startup_ns = 0
        self._begun = False
        self._whole = whole
        self._lock: threading.Lock = threading.Lock() if whole is None else whole._lock
        self._batches = 0
        self._samples = 0

    @property
    def batches(self) -> int:
        """Number of batches added."""
        self.sum_up()
        return self._batches

    @property
    def samples(self) -> int:
        """Number of samples in them."""
        self.sum_up()
        return self._samples

    def add(self, spans: Sequence[SpanTuple], samples: int = 0, request: Any = None) -> None:
        """Count one delivered batch; `spans` is kept and must not change."""
        pending = self._pending
        pending.append((self, spans, samples, request))
        if len(pending) >= _MOST_PENDING:
            self.sum_up()

    def sum_up(self) -> None:
        """Form the sums of what was added since the last call."""
        with self._lock:
            pending = self._pending[:]
            del self._pending[: len(pending)]  # another thread may have appended meanwhile
            while pending:
                totals = pending[0][0]
                mine = [delivered for delivered in pending if delivered[0] is totals]
                totals._add(mine)
                pending = [] if len(mine) == len(pending) else [each for each in pending if each[0] is not totals]

    def _add(self, pending: list[_Delivered]) -> None:
        if not self._begun:
            self._begun = True
            _, spans, samples, request = pending[0]
            pending[0] = self, self._begin(spans), samples, request
        durations: dict[tuple[str, int], list[int]] = {}
        for _, spans, _, _ in pending:
            for stage, start_ns, stop_ns, worker in spans:
                try:
                    durations[stage, worker].append(stop_ns - start_ns)
                except KeyError:
                    durations[stage, worker] = [stop_ns - start_ns]
        for totals in (self,) if self._whole is None else (self, self._whole):
            totals._batches += len(pending)
            totals._samples += sum(samples for _, _, samples, _ in pending)
            totals._count(durations)
            longest = max((max(each) for (stage, _), each in durations.items() if _is_building(stage)), default=0)
            if len(totals._slowest) < SLOWEST or longest > totals._slowest[-1].seconds * 1e9:
                totals._slowest = sorted([*totals._slowest, *_slow(pending)], key=_slowness)[:SLOWEST]
        self._recent.extend((spans, request) for _, spans, _, request in pending)

    def _count(self, durations: dict[tuple[str, int], list[int]]) -> None:
        for key, each in durations.items():
            cell = self._cells.get(key)
            if cell is None:
                cell = self._cells[key] = _StageSums(0, 0, 0, Histogram())
            cell.count += len(each)
            cell.total_ns += sum(each)
            cell.max_ns = max(cell.max_ns, *each)
            if is_wall(key[0]):
                cell.histogram.add(each)

    @property
    def recent(self) -> list[list[Span]]:
        """The spans of the last batches, oldest first."""
        return [[Span(*timed) for timed in batch.spans] for batch in self.recent_batches()]

    def recent_batches(self) -> list[RecentBatch]:
        """The last batches, oldest first."""
        self.sum_up()
        return [_recent(spans, request) for spans, request in self._recent.copy()]

    def stats(self) -> Stats:
        """The totals so far.

        Bytes, workers and skips are 0: their owners set them by `dataclasses.replace`.
        """
        self.sum_up()
        stages = self.stages()
        wait_s, step_s = (stages[stage].total_s if stage in stages else 0.0 for stage in LOOP)
        return Stats(
            batches=self._batches,
            samples=self._samples,
            wall_s=wait_s + step_s,
            wait_s=wait_s,
            startup_s=self._startup_ns / 1e9,
            step_s=step_s,
            step_cpu_s=stages["step"].cpu_s if "step" in stages else None,
            run_delay_s=sum(cell.total_ns for (stage, _), cell in self._items() if stage == RUN_DELAY) / 1e9,
            stages={stage: times for stage, times in stages.items() if stage not in LOOP},
            loop={stage: times for stage, times in stages.items() if stage in LOOP},
            slowest=tuple(self._slowest),
        )

    def stages(self) -> dict[str, StageTimes]:
        """The times of each stage over all workers, including "wait" and "step"."""
        cells: dict[str, list[tuple[int, _StageSums]]] = {}
        for (stage, worker), cell in self._items():
            cells.setdefault(stage, []).append((worker, cell))
        recent = _elapsed_ns(spans for spans, _ in self._recent.copy())
        return {
            stage: _times(parts, recent.get(stage, ()), cells.get(stage + CPU, ()))
            for stage, parts in cells.items()
            if is_wall(stage)
        }

    def _items(self) -> list[tuple[tuple[str, int], _StageSums]]:
        return list(self._cells.copy().items())

    def _begin(self, spans: Sequence[SpanTuple]) -> Sequence[SpanTuple]:
        """Count the wait for the first batch as start-up time.

        Its step is dropped: no step of the loop precedes the first batch.
        """
        startup_ns = sum(stop_ns - start_ns for stage, start_ns, stop_ns, _ in spans if stage == "wait")
        self._startup_ns += startup_ns
        if self._whole is not None:
            self._whole._startup_ns += startup_ns
        return [timed for timed in spans if timed[0] not in ("step", "step" + CPU)]


def _is_building(stage: str) -> bool:
    return stage not in LOOP and stage != "sample" and is_wall(stage)


def _slow(pending: Iterable[_Delivered]) -> Iterator[SlowBatch]:
    """Each batch with its longest stage."""
    for _, spans, _, request in pending:
        building = [timed for timed in spans if _is_building(timed[0])]
        if building and request is not None:
            stage, start_ns, stop_ns, worker = max(building, key=_duration)
            indices = getattr(request, "indices", ())
            yield SlowBatch(stage, (stop_ns - start_ns) / 1e9, worker, request.epoch, request.number, indices)


def _slowness(batch: SlowBatch) -> float:
    return -batch.seconds


def _duration(timed: SpanTuple) -> int:
    return timed[2] - timed[1]


def _recent(spans: Sequence[SpanTuple], request: Any) -> RecentBatch:
    return RecentBatch(spans, *((-1, -1) if request is None else (request.epoch, request.number)))


def _elapsed_ns(batches: Iterable[Sequence[SpanTuple]]) -> dict[str, list[int]]:
    elapsed: dict[str, list[int]] = {}
    for spans in batches:
        for stage, start_ns, stop_ns, _ in spans:
            elapsed.setdefault(stage, []).append(stop_ns - start_ns)
    return elapsed


def _times(
    cells: list[tuple[int, _StageSums]], recent_ns: Sequence[int], cpu_cells: Sequence[tuple[int, _StageSums]]
) -> StageTimes:
    histogram = Histogram()
    for _, cell in cells:
        histogram.merge(cell.histogram.counts)
    count, total_ns = sum(cell.count for _, cell in cells), sum(cell.total_ns for _, cell in cells)
    # CPU times are measured for a part of the spans: those of short batches are left out, but they all compute alike.
    measured = sum(cell.count for _, cell in cpu_cells)
    cpu_ns = sum(cell.total_ns for _, cell in cpu_cells)
    return StageTimes(
        count=count,
        total_s=total_ns / 1e9,
        median_s=(median(recent_ns) if recent_ns else 0) / 1e9,
        max_s=max(cell.max_ns for _, cell in cells) / 1e9,
        workers=tuple(sorted(worker for worker, _ in cells)),
        cpu_s=cpu_ns / 1e9 * count / measured if measured else None,
        histogram=tuple(histogram.counts),
    )
