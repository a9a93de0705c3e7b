"""Sums of spans, and histograms with fixed bounds on a logarithmic scale."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from feedline.core.kernels import native
from feedline.core.telemetry import (
    CPU,
    LOCK,
    MAIN,
    NBYTES,
    PARTS,
    PLACES,
    RUN_DELAY,
    STEP_THREADS_DELAY,
    SWITCHES,
    SpanTuple,
)

PER_OCTAVE = 4
"""Bounds per doubling: a quantile is at most a tenth off."""


_OCTAVES = 30


BOUNDS_NS = tuple(round(1000 * 2 ** (step / PER_OCTAVE)) for step in range(PER_OCTAVE * _OCTAVES + 1))
"""Upper bounds, inclusive, of all bins but the last: 1 µs to 18 minutes. All histograms have the same bounds, so that
their counts can be added.
"""


_BOUNDS = np.array(BOUNDS_NS, np.int64)


NO_COUNTS = (0,) * (len(BOUNDS_NS) + 1)
"""The counts of an empty histogram."""


def add_counts(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sum of the counts of several histograms."""
    return tuple(map(sum, zip(*histograms, strict=True))) if histograms else NO_COUNTS


class SpanSum(NamedTuple):
    """The spans of one stage on one worker."""

    number: int = 0
    total_ns: int = 0
    max_ns: int = 0
    counts: Sequence[int] = NO_COUNTS
    """Number of spans in each bin of the histogram."""

    def plus(self, elapsed_ns: int) -> SpanSum:
        """The sum with one more span."""
        counts = list(self.counts)
        counts[bisect_left(BOUNDS_NS, elapsed_ns)] += 1
        longest_ns = max(self.max_ns, elapsed_ns) if self.number else elapsed_ns
        return SpanSum(self.number + 1, self.total_ns + elapsed_ns, longest_ns, counts)


LOOP = ("wait", "step")
"""Stages of the training loop itself."""


_OF_STEP = ("step", "step" + CPU, "step" + SWITCHES)


REORDER = "reorder"
"""Stage of a batch that has been built and waits for an earlier one."""


_NOT_BUILDING = frozenset((*LOOP, "sample", REORDER, PARTS, RUN_DELAY, STEP_THREADS_DELAY, LOCK))


_OTHER_CLOCKS = (CPU, SWITCHES, NBYTES, PLACES)


class SpanSums:
    """Sums of spans, by stage and worker.

    Additions also go to the parent. One thread adds to the sums of one parent; any thread may read.
    """

    def __init__(self, parent: SpanSums | None = None, recent: int = 0) -> None:
        self._parent = parent
        self._recent: deque[tuple[list[SpanTuple], int, int]] = deque(maxlen=recent)
        self._cells: dict[tuple[str, int], SpanSum] = {}
        self.batches = self.samples = self.startup_ns = 0
        self.opening_ns = 0
        """Time before the wait for the first batch that counts as a part of it: that of `iter(loader)`."""
        self.in_order = True
        """False if no batch waits for an earlier one."""
        self._latest_built_ns = -1

    def add(self, spans: Sequence[SpanTuple], samples: int = 0, epoch: int = -1, number: int = -1) -> int:
        """Count the spans of a batch.

        The wait for the first batch is also start-up time. The step of the first batch does not count, because no step
        of the loop precedes it. Returns the time of the longest stage of building the batch, in ns; -1 without one.
        """
        started_ns = 0
        if not self.batches:
            spans = [timed for timed in spans if timed[0] not in _OF_STEP]
        spans = [*spans, *self._reorder(spans)]
        self._recent.append((list(spans), epoch, number))
        if not self.batches:
            spans = [_earlier(timed, self.opening_ns) for timed in spans]
            started_ns = sum(stop_ns - start_ns for stage, start_ns, stop_ns, _ in spans if stage == LOOP[0])
        for each in (self,) if self._parent is None else (self, self._parent):
            each.batches, each.samples = each.batches + 1, each.samples + samples
            each.startup_ns += started_ns
            for stage, start_ns, stop_ns, worker in spans:
                key = stage, worker
                each._cells[key] = each._cells.get(key, SpanSum()).plus(stop_ns - start_ns)
        return max(-1, *(stop_ns - start_ns for stage, start_ns, stop_ns, _ in spans if is_building(stage)), -1)

    def _reorder(self, spans: Sequence[SpanTuple]) -> list[SpanTuple]:
        """The span of a batch that was built before its predecessor."""
        built_ns = max((timed[2] for timed in spans if timed[3] >= 0 and is_building(timed[0])), default=-1)
        latest_ns, self._latest_built_ns = self._latest_built_ns, max(self._latest_built_ns, built_ns)
        return [(REORDER, built_ns, latest_ns, MAIN)] if self.in_order and 0 <= built_ns < latest_ns else []

    def recent(self, most: int) -> list[tuple[list[SpanTuple], int, int]]:
        """The latest batches, at most `most`, oldest first: spans, epoch and number."""
        return list(self._recent)[-most:]

    def cells(self) -> Mapping[tuple[str, int], Sequence[Any]]:
        """The fields of a `SpanSum` for each stage and worker."""
        return self._cells.copy()


def is_building(stage: str) -> bool:
    """True for a stage of building, on the wall clock."""
    return stage not in _NOT_BUILDING and not stage.endswith(_OTHER_CLOCKS)


def _earlier(timed: SpanTuple, opening_ns: int) -> SpanTuple:
    stage, start_ns, stop_ns, worker = timed
    return (stage, start_ns - opening_ns, stop_ns, worker) if stage == LOOP[0] else timed


def new_sums(parent: SpanSums | None = None, recent: int = 0) -> SpanSums:
    """Empty sums: native ones where there are native kernels.

    The latest `recent` batches are kept.
    """
    if native is None:
        return SpanSums(parent, recent)
    sums: SpanSums = native.SpanSums(_BOUNDS, parent, _NOT_BUILDING, _OTHER_CLOCKS, recent)
    return sums


def quantile_s(counts: Sequence[int], share: float) -> float:
    """Duration in seconds below which this share of the durations falls.

    0 for an empty histogram. Exact to a tenth between 1 µs and 18 minutes.
    """
    total = sum(counts)
    if not total:
        return 0.0
    place = bisect_left(list(accumulate(counts)), max(1.0, share * total))
    low = BOUNDS_NS[max(place - 1, 0)]
    high = BOUNDS_NS[min(place, len(BOUNDS_NS) - 1)]
    return sqrt(low * high) / 1e9  # the middle of the bin on a logarithmic scale


def in_use_share(probes: Sequence[int]) -> float | None:
    """Share of the probes of a lock that found it in use.

    None if there are too few probes. All probes of a free lock take about the same time: the time of the fastest probe,
    but at most `_FREE_NS`.
    """
    total = sum(probes)
    if total < _LEAST_PROBES:
        return None
    fastest = bisect_left(list(accumulate(probes)), max(1.0, _FASTEST * total))
    free = min(fastest, bisect_left(BOUNDS_NS, _FREE_NS)) + _SPREAD
    return sum(probes[free + 1 :]) / total


_LEAST_PROBES = 4


_FASTEST = 0.1
"""Share of the probes that show the time of a free lock."""


_FREE_NS = 150_000
"""Longest time of a probe of a free lock: it sleeps for 50 us, and the kernel wakes a thread up to 50 us late."""


_SPREAD = 2
"""Number of bins by which probes of a free lock differ; four bins double a time."""


def octaves(counts: Sequence[int]) -> list[tuple[float, int]]:
    """Cumulative counts at every doubling.

    Pairs of an upper bound in seconds and the number of durations up to it.
    """
    cumulative = list(accumulate(counts))
    return [(BOUNDS_NS[place] / 1e9, cumulative[place]) for place in range(0, len(BOUNDS_NS), PER_OCTAVE)]
