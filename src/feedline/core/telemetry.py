"""Timed stages of a batch.

Spans are recorded where the work happens, and travel with the batch.
"""

from __future__ import annotations

import resource
import sys
import threading
from contextlib import suppress
from time import monotonic_ns, process_time_ns, sleep, thread_time_ns
from typing import NamedTuple

import torch.utils.data._utils.worker as torch_worker

from feedline.core.kernels import native

MAIN = -1
"""`worker` of a span recorded in the training process."""


CPU = ".cpu"
"""Suffix of the stage of a span on the CPU clock of the worker that did the work.

"fetch.cpu" is the CPU time of a "fetch". For the rest of that time the worker waited, or was ready to run but did not.
"""


RUN_DELAY = "run_delay"
"""Stage of a span of run delay: time in which a worker was ready to run while other programs ran."""


LOCK = "lock"
"""Stage of a probe of Python's lock: the time until a thread that has given it back has it again."""


LOCK_SHARE = 128
"""Probes take at most this part of the time: one among busy threads waits for milliseconds."""


SWITCHES = ".switches"
"""Suffix of the stage of a span on a counter: how often the thread of the loop stopped to wait."""


CPU_EVERY_NS = 4_000_000
"""Time between two measurements of CPU time by a thread.

A batch that is measured reads its clocks seven times; each is a system call of half a microsecond, together a
thousandth of this time.
"""


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


class Recorder:
    """Spans and clocks of one thread.

    A batch calls `begin`, then `end` after each stage but the last one, then `finish`. The CPU clock is read once in
    `CPU_EVERY_NS`.
    """

    __slots__ = ("_cpu_ns", "_mark_ns", "delay_ns", "next_cpu_ns", "next_delay_ns", "own_process", "spans", "worker")

    def __init__(self) -> None:
        self.spans: list[SpanTuple] | None = None
        self.worker = MAIN
        self.own_process = False
        self.next_cpu_ns = self.next_delay_ns = self._mark_ns = 0
        self.delay_ns = self._cpu_ns = -1

    def begin(self) -> list[SpanTuple] | None:
        """Start the first stage of a batch.

        Its spans go to a new list. Returns the list before it, to be set again after the batch, or after an error.
        """
        outer, self.spans = self.spans, []
        self._mark_ns, self._cpu_ns = monotonic_ns(), -1
        if self._mark_ns >= self.next_cpu_ns:
            self.next_cpu_ns = self._mark_ns + CPU_EVERY_NS
            self._cpu_ns = self._cpu_time_ns()
        return outer

    def end(self, stage: str) -> None:
        """End a stage, and start the next one."""
        spans = self.spans
        assert spans is not None
        if self._cpu_ns >= 0:
            before, self._cpu_ns = self._cpu_ns, self._cpu_time_ns()
            spans.append((stage + CPU, before, self._cpu_ns, self.worker))
        before, self._mark_ns = self._mark_ns, monotonic_ns()
        spans.append((stage, before, self._mark_ns, self.worker))

    def finish(self, stage: str, outer: list[SpanTuple] | None) -> list[SpanTuple]:
        """End the last stage, and return the spans.

        `outer` is what `begin` returned.
        """
        self.end(stage)
        recorded = self.spans
        assert recorded is not None
        if self._mark_ns >= self.next_delay_ns:
            add_run_delay(recorded, self._mark_ns)
        self.spans = outer
        return recorded

    def _cpu_time_ns(self) -> int:
        return process_time_ns() if self.own_process else thread_time_ns()


def new_recorder() -> Recorder:
    """A recorder: native where possible, in a third of the time."""
    if native is not None and hasattr(native, "Recorder"):
        recorder: Recorder = native.Recorder(CPU_EVERY_NS, CPU, add_run_delay)
        return recorder
    return Recorder()


class _Threads(threading.local):
    """The recorder of each thread.

    One access to a thread's own data is as slow as ten to an object: a batch makes few of them.
    """

    def __init__(self) -> None:
        self.recorder = new_recorder()


def recorder_of_thread() -> Recorder:
    """The recorder of this thread."""
    return _threads.recorder


class recording:  # noqa: N801 - reads as a verb in a `with` statement
    """`with recording() as spans:` collects the spans of this thread."""

    __slots__ = ("_outer", "_recorder")

    def __enter__(self) -> list[SpanTuple]:
        recorder = self._recorder = _threads.recorder
        self._outer = recorder.spans
        spans: list[SpanTuple] = []
        recorder.spans = spans
        return spans

    def __exit__(self, _: object, __: object, ___: object) -> None:
        self._recorder.spans = self._outer


def work_as(worker: int, *, own_process: bool = False) -> None:
    """Assign the further spans of this thread to `worker`.

    In a process of its own, the CPU time of a span includes threads that the worker has started.
    """
    _threads.recorder.worker = worker
    if own_process:
        _threads.recorder.own_process = True


def add_run_delay(spans: list[SpanTuple], now_ns: int, *, among_threads: bool = False) -> None:
    """Append the run delay since the last reading.

    Once in `RUN_DELAY_EVERY_NS`; also a `LOCK` where threads work.
    `among_threads` is for the loop: True if its workers are threads.
    """
    current = _threads.recorder
    if now_ns < current.next_delay_ns:
        return
    probe_ns = 0
    if _HAS_LOCK and (among_threads or is_thread()):
        probe = _lock_wait(current.worker)
        spans.append(probe)
        probe_ns = probe[2] - probe[1]
    current.next_delay_ns = now_ns + max(RUN_DELAY_EVERY_NS, LOCK_SHARE * probe_ns)
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


def _lock_wait(worker: int) -> SpanTuple:
    """Give Python's lock back, and take it again.

    Others that compute in Python keep it for milliseconds; those that wait, or compute outside Python, do not have it.
    Time in which other programs had the CPUs does not count.
    """
    delay_ns, start_ns = _run_delay_ns(), monotonic_ns()
    sleep(_LONG_ENOUGH_S)
    stop_ns = monotonic_ns()
    return (LOCK, start_ns, max(stop_ns - max(_run_delay_ns() - delay_ns, 0), start_ns), worker)


_LONG_ENOUGH_S = 50e-6
"""Sleep in which a waiting thread can take the lock: a shorter system call has it back before others wake up."""


_HAS_LOCK = getattr(sys, "_is_gil_enabled", lambda: True)()


def waits_of_thread() -> int:
    """Number of times that this thread has stopped to wait.

    0 where the kernel does not count it.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if _COUNTS_WAITS else 0


_COUNTS_WAITS = hasattr(resource, "RUSAGE_THREAD")


def is_thread() -> bool:
    """True in a worker that is a thread of the training process."""
    return _threads.recorder.worker != MAIN and torch_worker._worker_info is None


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
        spans = _threads.recorder.spans
        if spans is not None:
            spans.append(Span(self.stage, self.start_ns, monotonic_ns(), _threads.recorder.worker))


_threads = _Threads()
