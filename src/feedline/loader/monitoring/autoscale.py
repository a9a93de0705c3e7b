"""`num_workers="auto"`: choice of the pool kind and of the worker count.

The kind follows from a short measurement before the first epoch, the count from a replay of the latest batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any

import numpy as np

from feedline.core.rng_globals import restoring_globals
from feedline.core.schedule import BatchRequest
from feedline.core.telemetry import Span, SpanTuple
from feedline.loader.report.context import Context
from feedline.loader.report.stats import Stats
from feedline.loader.report.verdict import model_of
from feedline.workers.base import PoolKind
from feedline.workers.registry import INLINE, PROCESSES, THREADS

INLINE_BELOW_NS = 300_000
"""Batches that are built faster stay in the training process: sending one would cost about as much."""


PROBE_NS = 50_000_000
"""Time limit of the measurement after its first sample."""


PARALLEL_ABOVE = 1.4
"""Speed-up of two threads over one that shows that the work releases the GIL."""


LEAST_BATCHES = 32
"""Least number of batches between two decisions about the worker count."""


REPLAYED_BATCHES = 64
"""Latest batches that are replayed for a decision."""


LEAST_INTERVAL_NS = 500_000_000
"""Time between decisions after a change. A decision takes the loop about ten milliseconds."""


MOST_INTERVAL_NS = 60_000_000_000
"""Longest time between decisions: it doubles while nothing changes."""


MOST_WORKERS = 32
"""Highest number of workers that "auto" starts: each costs memory."""


ENOUGH_SHARE = 0.97
"""Share of the best gain that is enough to choose fewer workers."""


def kind_by_measurement(builder: Any, batch_size: int, seed: int | None, thread_safe: bool) -> PoolKind:
    """Choose a pool kind by building samples of a map-style dataset.

    The samples are spread over the dataset and discarded. The random generators of the process are restored.
    """
    try:
        return _measure(builder, batch_size, seed, thread_safe)
    except Exception:  # noqa: BLE001 - the order may not contain the sample; if it does, the error is raised there
        return PROCESSES


def _measure(builder: Any, batch_size: int, seed: int | None, thread_safe: bool) -> PoolKind:
    length = len(builder.dataset)
    if length == 0:
        return INLINE
    rows = range(min(batch_size, length))
    request = BatchRequest(0, 0, 0, len(rows), [row * length // len(rows) for row in rows], rows, seed)
    with restoring_globals():
        if builder.vectorized:  # measured as it runs: whole batches
            part = request._replace(indices=np.array(request.indices))
            done, elapsed_ns = _probe(lambda _: builder(part), range(8))
        else:
            done, elapsed_ns = _probe(lambda row: builder(_rows(request, [row], builder.batched)), rows)
            part, elapsed_ns = _rows(request, rows[:done], builder.batched), elapsed_ns * batch_size
        if elapsed_ns // done < INLINE_BELOW_NS:
            return INLINE
        # Native code uses several threads without Python; threads avoid the cost of crossing processes.
        if thread_safe and builder.supports_threads:
            return THREADS
        if thread_safe and _gain_of_two_threads(builder, part) > PARALLEL_ABOVE:
            return THREADS
    return PROCESSES


def _rows(request: BatchRequest, rows: Sequence[int], batched: bool) -> BatchRequest:
    """Rows of a request; a bare index if not batched."""
    part = request.part(rows)
    return part if batched else part._replace(indices=part.indices[0])


def _probe(build: Callable[[int], Any], rows: Sequence[int]) -> tuple[int, int]:
    """Number of rows built after a warm-up, and their nanoseconds."""
    build(rows[0])
    start, done = perf_counter_ns(), 0
    while done < len(rows) and perf_counter_ns() - start < PROBE_NS:
        build(rows[done])
        done += 1
    return done, perf_counter_ns() - start


def _gain_of_two_threads(builder: Any, part: BatchRequest) -> float:
    start = perf_counter_ns()
    builder(part)
    alone_ns = perf_counter_ns() - start
    with ThreadPoolExecutor(2) as pool:
        start = perf_counter_ns()
        list(pool.map(builder, [part, part]))
        together_ns = perf_counter_ns() - start
    return 2 * alone_ns / together_ns


@dataclass(slots=True)
class Autoscale:
    """Worker count that follows the predictions of the loop's model.

    The latest batches are replayed with the present count and with others. `ceiling` is the highest count. It may
    exceed the number of CPUs, because samples that wait need none. Reads no clock: all times come from the spans given
    to `observe`.
    """

    workers: int
    ceiling: int
    context: Context
    _recent: list[Sequence[SpanTuple]] = field(init=False, default_factory=list)
    _wall_ns: int = field(init=False, default=0)
    _skipped: int = field(init=False, default=0)
    _interval_ns: int = field(init=False, default=LEAST_INTERVAL_NS)

    def observe(self, spans: Sequence[SpanTuple]) -> int | None:
        """Add the spans of a delivered batch.

        Returns the new worker count, or None for no change.
        """
        if self._skipped <= self.workers * self.context.prefetch_factor:
            self._skipped += 1  # these were requested from another number of workers
            return None
        self._recent.append(spans)
        self._wall_ns += sum(stop_ns - start_ns for stage, start_ns, stop_ns, _ in spans if stage in ("wait", "step"))
        if len(self._recent) < LEAST_BATCHES or self._wall_ns < self._interval_ns:
            return None
        return self._decide()

    def _decide(self) -> int | None:
        recent = [[Span(*timed) for timed in spans] for spans in self._recent[-REPLAYED_BATCHES:]]
        self._recent.clear()
        self._wall_ns = 0
        wanted = self._best(recent)
        # A change moves the loop away from the recording: the count is doubled or halved at most, and then measured
        # again.
        wanted = min(max(wanted, self.workers // 2, 1), 2 * self.workers, self.ceiling)
        if wanted == self.workers:
            self._interval_ns = min(2 * self._interval_ns, MOST_INTERVAL_NS)
            return None
        self.workers, self._skipped, self._interval_ns = wanted, 0, LEAST_INTERVAL_NS
        return wanted

    def _best(self, recent: Sequence[Sequence[Span]]) -> int:
        """The fewest workers that are nearly the fastest."""
        context = replace(self.context, num_workers=self.workers)
        model = model_of(Stats(), context, recent)
        if model is None:
            return self.workers
        present = context.setting
        counts = {self.workers // 2, self.workers - 1, self.workers, self.workers + 1, 2 * self.workers}
        gains = {
            number: model.gain(model.with_setting(replace(present, num_workers=number)))
            for number in sorted(counts)
            if 1 <= number <= self.ceiling
        }
        best = max(gains.values())
        return next(number for number, gain in gains.items() if gain >= ENOUGH_SHARE * best)
