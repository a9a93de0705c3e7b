"""Sums of spans, by stage and worker, and the latest batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from feedline.core.batch import Padding
from feedline.core.histogram import LOOP, SpanSum, SpanSums, add_counts, in_use_share, is_building, new_sums
from feedline.core.stage_parts import READ, is_part
from feedline.core.telemetry import BATCH, CPU, LOCK, MAIN, NBYTES, PARTS, RUN_DELAY, SWITCHES, Span, SpanTuple
from feedline.loader.monitoring.padding import PaddingSums
from feedline.loader.report.stats import SlowBatch, StageTimes, Stats, is_wall

RECENT = 256
"""Number of latest batches whose spans are kept, for medians and exporters."""


SLOWEST = 8
"""Number of slowest batches that are kept."""


class RecentBatch(NamedTuple):
    """Spans of a delivered batch, with its place in the epoch."""

    spans: Sequence[SpanTuple]
    epoch: int
    number: int


class Totals:
    """Count, sum, maximum and histogram of spans, by stage and worker.

    One thread adds; any thread may read, and never waits. Every batch is also added to `whole`, the totals of all
    epochs.
    """

    # Defaults of the class: most short epochs change none of them.
    slow_ns = -1
    """A batch whose longest stage takes more time is among the slowest, for `keep_slow`."""
    _closing_ns = 0
    _last_step_ns = _last_wait_ns = _left_ns = 0
    _padding: PaddingSums | None = None

    def __init__(self, recent: int = RECENT, whole: Totals | None = None) -> None:
        # A batch is added at once: those of an iteration that has been dropped are not lost.
        self.sums: SpanSums = new_sums(None if whole is None else whole.sums, recent)
        self._recent = recent
        self._slowest: list[_SlowSpans] = []
        self._whole = whole

    @property
    def batches(self) -> int:
        """Number of batches added."""
        return self.sums.batches

    @property
    def samples(self) -> int:
        """Number of samples in these batches."""
        return self.sums.samples

    def add(self, spans: Sequence[SpanTuple], samples: int = 0, request: Any = None) -> None:
        """Count one delivered batch.

        A loop instead calls `sums`, and `keep_slow` for a slow batch: a call of this method would take as long as all
        that it records.
        """
        if request is None:
            self.sums.add(spans, samples)
        elif (longest_ns := self.sums.add(spans, samples, request.epoch, request.number)) > self.slow_ns:
            self.keep_slow(longest_ns, spans, request)

    def add_padding(self, padding: Padding) -> None:
        """Count the padded places of a batch."""
        for totals in self._each():
            if totals._padding is None:
                totals._padding = PaddingSums()
            totals._padding.add(padding)

    def add_startup(self, elapsed_ns: int) -> None:
        """Count the time of `iter(loader)` as waiting for the first batch."""
        self.sums.opening_ns = elapsed_ns

    def add_closing(self, elapsed_ns: int) -> None:
        """Count the time from an epoch's end until its workers ended."""
        for totals in self._each():
            totals._closing_ns += elapsed_ns

    def add_end(self, waits_from_ns: int, now_ns: int) -> None:
        """Count a wait without a batch, and the step before it."""
        step_ns, wait_ns = self.unfinished_ns(waits_from_ns, now_ns)
        self._left_ns, self.sums.opening_ns = now_ns, 0  # they count once, also if a batch follows
        for totals in self._each():
            totals._last_step_ns += step_ns
            totals._last_wait_ns += wait_ns

    def unfinished_ns(self, waits_from_ns: int, now_ns: int) -> tuple[int, int]:
        """Nanoseconds of the current wait, after those of the step before it.

        Their spans are added with the next batch only. Both are 0 without a wait, also if its batch has just arrived.
        """
        if not waits_from_ns:
            return 0, 0
        left_ns = self._left_ns
        for stage, _, stop_ns, _ in reversed(self.latest()):  # the wait is among the last
            if stage == LOOP[0]:
                left_ns = max(left_ns, stop_ns)
                break
        if not left_ns:
            return 0, self.sums.opening_ns + max(now_ns - waits_from_ns, 0)
        return (waits_from_ns - left_ns, max(now_ns - waits_from_ns, 0)) if left_ns <= waits_from_ns else (0, 0)

    def _each(self) -> tuple[Totals, ...]:
        return (self,) if self._whole is None else (self, self._whole)

    def keep_slow(self, longest_ns: int, spans: Sequence[SpanTuple], request: Any) -> None:
        """Keep a slow batch; `longest_ns` is the result of `SpanSums.add`."""
        # The constructor of tuple takes a third of the time of the named tuple's; each batch of a short epoch is kept.
        slow = tuple.__new__(
            _SlowSpans, (longest_ns, spans, request.epoch, request.number, getattr(request, "indices", ()))
        )
        for totals in self._each():
            if longest_ns <= totals.slow_ns:
                continue
            if len(totals._slowest) < SLOWEST - 1:  # an epoch of a few batches keeps all of them
                totals._slowest.append(slow)
                continue
            totals._slowest = _by_time([*totals._slowest, slow])[:SLOWEST]
            totals.slow_ns = totals._slowest[-1].longest_ns

    @property
    def recent(self) -> list[list[Span]]:
        """The spans of the last batches, oldest first."""
        return [[Span(*timed) for timed in batch.spans] for batch in self.recent_batches()]

    def recent_batches(self) -> list[RecentBatch]:
        """The last batches, oldest first."""
        return [RecentBatch(*kept) for kept in self.sums.recent(self._recent)]

    def latest(self) -> Sequence[SpanTuple]:
        """The spans of the latest batch; empty before the first."""
        kept = self.sums.recent(1)
        return kept[0][0] if kept else ()

    def stats(self, unfinished_ns: tuple[int, int] = (0, 0)) -> Stats:
        """The totals so far, with a result of `unfinished_ns`.

        Bytes, workers and skips are 0: their owners set them by `dataclasses.replace`.
        """
        cells = self._cells()
        stages = self.stages()
        step_ns, wait_ns = (
            sum(each) for each in zip(unfinished_ns, (self._last_step_ns, self._last_wait_ns), strict=True)
        )
        wait_s, step_s = (stages[stage].total_s if stage in stages else 0.0 for stage in LOOP)
        wait_s, step_s = wait_s + wait_ns / 1e9, step_s + step_ns / 1e9
        return Stats(
            batches=self.batches,
            samples=self.samples,
            wall_s=wait_s + step_s,
            wait_s=wait_s,
            startup_s=self.sums.startup_ns / 1e9,
            closing_s=self._closing_ns / 1e9,
            step_s=step_s,
            step_cpu_s=stages["step"].cpu_s if "step" in stages else None,
            run_delay_s=sum(cell.total_ns for (stage, _), cell in cells.items() if stage == RUN_DELAY) / 1e9,
            lock_s=_lock_s(cells, of_loop=False),
            loop_lock_s=_lock_s(cells, of_loop=True),
            lock_share=_lock_share(cells),
            step_waits=_step_waits(cells),
            stages={stage: times for stage, times in stages.items() if stage not in LOOP},
            loop={stage: times for stage, times in stages.items() if stage in LOOP},
            slowest=tuple(map(_slow_batch, _by_time(self._slowest))),
            read_nbytes=_read_nbytes(cells),
            delivered_nbytes=_delivered_nbytes(cells),
            padding_share=None if self._padding is None else self._padding.share,
            uneven_share=None if self._padding is None else self._padding.uneven_share,
        )

    def stages(self) -> dict[str, StageTimes]:
        """The times of each stage over all workers, including "wait" and "step"."""
        cells: dict[str, list[tuple[int, SpanSum]]] = {}
        for (stage, worker), cell in self._cells().items():
            cells.setdefault(stage, []).append((worker, cell))
        recent = _elapsed_ns(spans for spans, *_ in self.sums.recent(self._recent))
        scale = _scale_of_parts(cells)
        times = {
            stage: _times(parts, recent.get(stage, ()), cells.get(stage + CPU, ()), scale if is_part(stage) else 1.0)
            for stage, parts in cells.items()
            if is_wall(stage)
        }
        return _with_parts_behind(times)

    def _cells(self) -> dict[tuple[str, int], SpanSum]:
        return {key: SpanSum(*fields) for key, fields in self.sums.cells().items()}


def _with_parts_behind(times: dict[str, StageTimes]) -> dict[str, StageTimes]:
    """The stages, with their timed parts after "fetch"."""
    parts = {stage: each for stage, each in times.items() if is_part(stage)}
    names = sorted(parts, key=lambda stage: (not stage.startswith(READ), stage))
    ordered: dict[str, StageTimes] = {}
    for stage, each in times.items():
        if stage not in parts:
            ordered[stage] = each
            if stage == "fetch":
                ordered.update((name, parts[name]) for name in names)
    return ordered | parts


_STAGES_WITH_PARTS = ("fetch", "collate")
"""Stages whose parts are timed."""


def _scale_of_parts(cells: Mapping[str, Sequence[tuple[int, SpanSum]]]) -> float:
    """Ratio of all building time to that with timed parts."""
    built_ns = sum(cell.total_ns for stage in _STAGES_WITH_PARTS for _, cell in cells.get(stage, ()))
    timed_ns = sum(cell.total_ns for _, cell in cells.get(PARTS, ()))
    return max(built_ns / timed_ns, 1.0) if timed_ns else 1.0


def _read_nbytes(cells: Mapping[tuple[str, int], SpanSum]) -> float | None:
    """Mean bytes that a batch has read; None if unknown."""
    read = [cell for (stage, _), cell in cells.items() if stage.startswith(READ) and stage.endswith(NBYTES)]
    batches = sum(cell.number for (stage, _), cell in cells.items() if stage == PARTS)
    return sum(cell.total_ns for cell in read) / batches if read and batches else None


def _delivered_nbytes(cells: Mapping[tuple[str, int], SpanSum]) -> float | None:
    """Mean bytes of the arrays of a batch; None if unknown."""
    cell = cells.get((BATCH + NBYTES, MAIN))
    return None if cell is None else cell.total_ns / cell.number


def _lock_s(cells: Mapping[tuple[str, int], SpanSum], *, of_loop: bool) -> float | None:
    """Mean wait for Python's lock, of the loop or of workers.

    None if it was not probed.
    """
    probes = _probes(cells, of_loop=of_loop)
    number = sum(cell.number for cell in probes)
    return sum(cell.total_ns for cell in probes) / number / 1e9 if number else None


def _lock_share(cells: Mapping[tuple[str, int], SpanSum]) -> float | None:
    """Share of probes that found Python's lock in use, if known."""
    shares = [
        in_use_share(add_counts([cell.counts for cell in _probes(cells, of_loop=of_loop)])) for of_loop in (False, True)
    ]
    return max((share for share in shares if share is not None), default=None)


def _probes(cells: Mapping[tuple[str, int], SpanSum], *, of_loop: bool) -> list[SpanSum]:
    return [cell for (stage, worker), cell in cells.items() if stage == LOCK and (worker == MAIN) == of_loop]


def _step_waits(cells: Mapping[tuple[str, int], SpanSum]) -> float:
    cell = cells.get(("step" + SWITCHES, MAIN))
    return 0.0 if cell is None else cell.total_ns / cell.number


class _SlowSpans(NamedTuple):
    """Spans of a slow batch, from which a report makes a `SlowBatch`."""

    longest_ns: int
    """Time of the longest stage of building."""
    spans: Sequence[SpanTuple]
    epoch: int
    number: int
    indices: Any


def _by_time(slowest: list[_SlowSpans]) -> list[_SlowSpans]:
    """The slow batches, longest first."""
    return sorted(slowest, key=attrgetter("longest_ns"), reverse=True)


def _slow_batch(slow: _SlowSpans) -> SlowBatch:
    stage, start_ns, stop_ns, worker = max((timed for timed in slow.spans if is_building(timed[0])), key=_duration)
    return SlowBatch(stage, (stop_ns - start_ns) / 1e9, worker, slow.epoch, slow.number, slow.indices)


def _duration(timed: SpanTuple) -> int:
    return timed[2] - timed[1]


def _elapsed_ns(batches: Iterable[Sequence[SpanTuple]]) -> dict[str, list[int]]:
    elapsed: dict[str, list[int]] = {}
    for spans in batches:
        for stage, start_ns, stop_ns, _ in spans:
            elapsed.setdefault(stage, []).append(stop_ns - start_ns)
    return elapsed


def _times(
    cells: list[tuple[int, SpanSum]],
    recent_ns: Sequence[int],
    cpu_cells: Sequence[tuple[int, SpanSum]],
    scale: float = 1.0,
) -> StageTimes:
    """Times of a stage, extrapolated from some batches by `scale`."""
    number, total_ns = sum(cell.number for _, cell in cells), sum(cell.total_ns for _, cell in cells) * scale
    # CPU times are measured for a part of the spans: those of short batches are left out, but all batches compute in
    # the same way.
    measured = sum(cell.number for _, cell in cpu_cells)
    cpu_ns = sum(cell.total_ns for _, cell in cpu_cells)
    return StageTimes(
        count=round(number * scale),
        total_s=total_ns / 1e9,
        median_s=(median(recent_ns) if recent_ns else 0) / 1e9,
        max_s=max(cell.max_ns for _, cell in cells) / 1e9,
        workers=tuple(sorted(worker for worker, _ in cells)),
        cpu_s=cpu_ns / 1e9 * number * scale / measured if measured else None,
        histogram=add_counts([cell.counts for _, cell in cells]),
    )
