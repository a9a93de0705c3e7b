"""`num_workers="auto"`: where to run, from a short measurement; how many workers, from what the loop experiences."""

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
"""A batch cheaper than this is built in the training process: handing it over would cost a good part of it."""


PROBE_NS = 50_000_000
"""How long the measurement may go on once it has seen one sample."""


PARALLEL_ABOVE = 1.4
"""Two threads that get this much more done than one are worth having: the work releases the GIL."""


EVERY = 32
"""Batches between two looks at the worker count."""


def kind_by_measurement(builder: Any, batch_size: int, seed: int | None, thread_safe: bool) -> PoolKind:
    """The kind of pool for this builder, from samples spread over its map-style dataset.

    Nothing of the measurement is delivered, and the process's random generators are put back.
    """
    try:
        return _measure(builder, batch_size, seed, thread_safe)
    except Exception:  # noqa: BLE001 - a sample that the order may never ask for; if it does, it is raised there
        return PROCESSES


def _measure(builder: Any, batch_size: int, seed: int | None, thread_safe: bool) -> PoolKind:
    length = len(builder.dataset)
    if length == 0:
        return INLINE
    rows = range(min(batch_size, length))
    request = BatchRequest(0, 0, 0, len(rows), [row * length // len(rows) for row in rows], rows, seed)
    with restored_globals():
        if builder.vectorized:  # as it would run: whole batches at once
            part = request._replace(indices=np.array(request.indices))
            done, elapsed_ns = _probe(lambda _: builder(part), range(8))
        else:
            done, elapsed_ns = _probe(lambda row: builder(_rows(request, [row], builder.batched)), rows)
            part, elapsed_ns = _rows(request, rows[:done], builder.batched), elapsed_ns * batch_size
        if elapsed_ns // done < INLINE_BELOW_NS:
            return INLINE
        # Native code that several threads share: nothing crosses a process border.
        if thread_safe and builder.supports_threads:
            return THREADS
        if thread_safe and _gain_of_two_threads(builder, part) > PARALLEL_ABOVE:
            return THREADS
    return PROCESSES


def _rows(request: BatchRequest, rows: Sequence[int], batched: bool) -> BatchRequest:
    """Some rows of the request; one bare index for a builder of single samples."""
    part = request.part(rows)
    return part if batched else part._replace(indices=part.indices[0])


def _probe(build: Callable[[int], Any], rows: Sequence[int]) -> tuple[int, int]:
    """How many rows were built, and in how many nanoseconds; the first one counts only if there is no other."""
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
    """Follows the wait of the loop: one worker more while it waits, one less while workers idle. Pure of clocks.

    `ceiling` bounds the workers; `observe` is given the spans of every delivered batch.
    """

    workers: int
    ceiling: int
    _work_ns: int = field(init=False, default=0)
    _wait_ns: int = field(init=False, default=0)
    _wall_ns: int = field(init=False, default=0)
    _batches: int = field(init=False, default=0)

    def observe(self, spans: Sequence[SpanTuple]) -> int | None:
        """The worker count to change to, or None to leave it."""
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
