"""Clocks of the loop's thread that cost more than a wall clock."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns, process_time_ns, thread_time_ns
from typing import Any

import numpy as np
import torch

from feedline.core.telemetry import (
    BATCH,
    CPU,
    CPU_EVERY_NS,
    MAIN,
    NBYTES,
    SWITCHES,
    SpanTuple,
    add_run_delay,
    waits_of_thread,
)


class StepClocks:
    """CPU time and waits of the loop's steps, read every few milliseconds."""

    def __init__(self, *, has_processes: bool, works_ahead: bool) -> None:
        # The CPU time of a step includes the threads that compute it, but not those that build batches.
        self._cpu_clock = process_time_ns if has_processes or not works_ahead else thread_time_ns
        self._among_threads = works_ahead and not has_processes
        self._step_threads = torch.get_num_threads() - 1 if has_processes else 0
        self._next_ns = self._left_waits = 0
        self._left_cpu_ns: int | None = None
        self._size_due_ns = 0
        self.due_ns = 0
        """Time from which the loop passes its next call to `call`."""
        self.read = False
        """True during a call in which the clocks are read."""
        self.spans: list[SpanTuple] = []
        """Spans for the next batch to be delivered."""

    def begin_again(self) -> None:
        """Begin the next epoch of the same loop.

        Short epochs share a reading.
        """
        self._left_cpu_ns, self.read, self.spans = None, False, []
        self.due_ns = self._next_ns - CPU_EVERY_NS + _EPOCH_NS

    def call(self, called_ns: int) -> None:
        """Record the end of a step: the loop calls for a batch."""
        if self._left_cpu_ns is not None:
            self.spans.append(("step" + CPU, self._left_cpu_ns, self._cpu_clock(), MAIN))
            self.spans.append(("step" + SWITCHES, self._left_waits, waits_of_thread(), MAIN))
            self._left_cpu_ns, self.due_ns = None, self._next_ns
        self.read = called_ns >= self.due_ns

    def deliver(self, batch: Any) -> None:
        """Record the start of a step; the next call ends it."""
        now_ns = monotonic_ns()
        if now_ns >= self._size_due_ns:
            self.spans.append((BATCH + NBYTES, 0, _nbytes(batch), MAIN))
            counted_ns = monotonic_ns()
            self._size_due_ns, now_ns = counted_ns + _SIZE_PAUSE_FACTOR * (counted_ns - now_ns), counted_ns
        add_run_delay(self.spans, now_ns, among_threads=self._among_threads, step_threads=self._step_threads)
        self.read, self.due_ns, self._next_ns = False, 0, now_ns + CPU_EVERY_NS
        self._left_cpu_ns, self._left_waits = self._cpu_clock(), waits_of_thread()

    def timed(self, stage: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, and record it as a stage."""
        before_ns, began_ns = self._cpu_clock() if self.read else 0, monotonic_ns()
        try:
            return function(*arguments)
        finally:
            self.spans.append((stage, began_ns, monotonic_ns(), MAIN))
            if self.read:
                self.spans.append((stage + CPU, before_ns, self._cpu_clock(), MAIN))


def _nbytes(batch: Any) -> int:
    """Bytes of the tensors and arrays of a batch.

    Objects of unknown types, sparse tensors and containers with more than `_MOST_FIELDS` parts count as 0.
    """
    nbytes, left, containers = 0, [batch], set[int]()
    while left:  # no recursion: samples may be nested deeply, and refer to their own parents
        part = left.pop()
        if isinstance(part, torch.Tensor):
            nbytes += part.nbytes if part.layout is torch.strided else 0
        elif isinstance(part, np.ndarray):
            nbytes += part.nbytes
        # Lists of Python objects may be as long as the batch.
        elif type(part) in (list, tuple, dict) and len(part) <= _MOST_FIELDS and id(part) not in containers:
            containers.add(id(part))
            left += part.values() if type(part) is dict else part
    return nbytes


_SIZE_PAUSE_FACTOR = 400
"""Counting the bytes of batches takes at most 1 / `_SIZE_PAUSE_FACTOR` of the time."""


_EPOCH_NS = 1_000_000
"""Time after a reading in which a new epoch makes no other one."""


_MOST_FIELDS = 64
