"""`num_workers="auto"`: choice of the pool kind and of the worker count.

The kind follows from a short measurement before the first epoch, the count from the waiting time of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import numpy as np

from feedline.core.rng_globals import restored_globals
from feedline.core.schedule import BatchRequest
from feedline.core.telemetry import SpanTuple
from feedline.workers.base import PoolKind
from feedline.workers.registry import INLINE, PROCESSES, THREADS

INLINE_BELOW_NS = 300_000
"""Batches that build faster stay in the training process: sending one would cost about as much."""


PROBE_NS = 50_000_000
"""Time limit of the measurement after its first sample."""


PARALLEL_ABOVE = 1.4
"""Speed-up of two threads over one from which the work counts as releasing the GIL."""


EVERY = 32
"""Batches between two decisions about the worker count."""


def kind_by_measurement(builder: Any, batch_size: int, seed: int | None, thread_safe: bool) -> PoolKind:
    """Choose a pool kind by building samples of a map-style dataset.

    They are spread over the dataset. The samples are discarded, and the random generators of the process are restored.
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
    with restored_globals():
        if builder.vectorized:  # measured as it runs: whole batches
            part = request._replace(indices=np.array(request.indices))
            done, elapsed_ns = _probe(lambda _: builder(part), range(8))
        else:
            done, elapsed_ns = _probe(lambda row: builder(_rows(request, [row], builder.batched)), rows)
            part, elapsed_ns = _rows(request, rows[:done], builder.batched), elapsed_ns * batch_size
        if elapsed_ns // done < INLINE_BELOW_NS:
            return INLINE
        # Native code uses several threads without Python; threads spare the cost of crossing processes.
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
    """Worker count that follows the waiting time of the loop.

    One worker is added while the loop waits, one removed while workers idle. `ceiling` is the most workers. Reads no
    clock: all times come from the spans given to `observe`.
    """

    workers: int
    ceiling: int
    _work_ns: int = field(init=False, default=0)
    _wait_ns: int = field(init=False, default=0)
    _wall_ns: int = field(init=False, default=0)
    _batches: int = field(init=False, default=0)

    def observe(self, spans: Sequence[SpanTuple]) -> int | None:
        """Add the spans of a delivered batch.

        Returns the new worker count, or None for no change.
        """
        for stage, start_ns, stop_ns, _ in spans:
            if stage in ("fetch", "collate", "encode"):
                self._work_ns += stop_ns - start_ns
            elif stage in ("wait", "step"):
                self._wall_ns += stop_ns - start_ns
                if stage == "wait":
                    self._wait_ns += stop_ns - start_ns
        self._batches += 1
        return self._decide() if self._batches >= EVERY else None

    def _decide(self) -> int | None:
        wait = self._wait_ns / max(self._wall_ns, 1)
        needed = self._work_ns / max(self._wall_ns, 1)  # workers that would be busy all the time
        self._batches = self._work_ns = self._wait_ns = self._wall_ns = 0
        if wait > 0.1 and self.workers < self.ceiling:
            self.workers += 1
        elif wait < 0.02 and self.workers > 1 and needed < 0.7 * (self.workers - 1):
            self.workers -= 1
        else:
            return None
        return self.workers
