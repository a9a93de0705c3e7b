"""Timed stages of a batch.

Spans are recorded where the work happens, and travel with the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns, process_time_ns, thread_time_ns
from typing import NamedTuple

import torch.utils.data._utils.worker as torch_worker

MAIN = -1
"""`worker` of a span recorded in the training process."""


CPU = ".cpu"
"""Suffix of the stage of a span on the CPU clock of the worker that did the work.

"fetch.cpu" is the CPU time of a "fetch": the rest of its time it waited, or was ready to run and did not.
"""


RUN_DELAY = "run_delay"
"""Stage of a span on the clock of the time in which a worker was ready to run, but other programs ran."""


CPU_EVERY_NS = 1_000_000
"""Time between two measurements of CPU time by a thread: reading its clock costs a third of a microsecond."""


RUN_DELAY_EVERY_NS = 100_000_000
"""Time between two readings of the run delay, each of which opens a file."""


class Span(NamedTuple):
    """One timed stage of one batch.

    Times are of CLOCK_MONOTONIC: comparable between all processes of a machine since its boot.
    """

    stage: str
    start_ns: int
    stop_ns: int
    worker: int = MAIN


SpanTuple = tuple[str, int, int, int]
"""A span without field names.

Every batch creates a few, and a plain tuple costs a fifth.
"""


def spent(stage: str, start_ns: int, stop_ns: int) -> SpanTuple:
    """A span of this thread, from `start_ns` to `stop_ns`."""
    return (stage, start_ns, stop_ns, _current.worker)


class _Current(threading.local):
    spans: list[SpanTuple] | None = None
    worker: int = MAIN
    cpu_clock: Callable[[], int] = staticmethod(thread_time_ns)
    next_cpu_ns: int = 0
    next_delay_ns: int = 0
    delay_ns: int = -1


_current = _Current()


class recording:  # noqa: N801 - reads as a verb in a `with` statement
    """`with recording() as spans:` collects the spans of this thread."""

    __slots__ = ("_outer",)

    def __enter__(self) -> list[SpanTuple]:
        self._outer = _current.spans
        spans: list[SpanTuple] = []
        _current.spans = spans
        return spans

    def __exit__(self, *_: object) -> None:
        _current.spans = self._outer


def work_as(worker: int, *, own_process: bool = False) -> None:
    """Assign the further spans of this thread to `worker`.

    In a process of its own, the CPU time of a span includes threads that the worker has started.
    """
    _current.worker = worker
    if own_process:
        _current.cpu_clock = process_time_ns


def start_cpu(now_ns: int) -> int | None:
    """CPU clock of this worker; None if it was just read.

    It is read once in `CPU_EVERY_NS`.
    """
    current = _current
    if now_ns < current.next_cpu_ns:
        return None
    current.next_cpu_ns = now_ns + CPU_EVERY_NS
    return current.cpu_clock()


def spent_cpu(stage: str, start_ns: int) -> tuple[SpanTuple, int]:
    """A span on the CPU clock until now, and the clock."""
    now_ns = _current.cpu_clock()
    return (stage + CPU, start_ns, now_ns, _current.worker), now_ns


def add_run_delay(spans: list[SpanTuple], now_ns: int) -> None:
    """Append the run delay since the last reading, once in `RUN_DELAY_EVERY_NS`."""
    current = _current
    if now_ns < current.next_delay_ns:
        return
    current.next_delay_ns = now_ns + RUN_DELAY_EVERY_NS
    before, current.delay_ns = current.delay_ns, _run_delay_ns()
    if 0 <= before <= current.delay_ns:
        spans.append((RUN_DELAY, before, current.delay_ns, current.worker))


def _run_delay_ns() -> int:
    """Nanoseconds in which this thread was ready but did not run.

    -1 where the kernel does not count them.
    """
    # A file object closes itself also where an interrupt comes before the `with`.
    with suppress(OSError, IndexError, ValueError), open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
        return int(file.read().split()[1])
    return -1


def is_thread() -> bool:
    """True in a worker that is a thread of the training process."""
    return _current.worker != MAIN and torch_worker._worker_info is None


class span:  # noqa: N801 - reads as a verb in a `with` statement
    """`with span("decode"):` times its block.

    Outside `recording()` it costs two clock reads and keeps nothing.
    """

    __slots__ = ("stage", "start_ns")

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __enter__(self) -> None:
        self.start_ns = monotonic_ns()

    def __exit__(self, *_: object) -> None:
        spans = _current.spans
        if spans is not None:
            spans.append(Span(self.stage, self.start_ns, monotonic_ns(), _current.worker))
