"""Timed stages of a batch.

Spans are recorded where the work happens, and travel with the batch.
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
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


HELPERS = "helpers"
"""Threads that a worker process has started. Only their CPU time is recorded, and their run delay with the worker's."""


STEP_THREADS_DELAY = "step_threads_delay"
"""Stage of a span of run delay of the threads that compute steps with the loop's thread, divided by their number."""


LOCK = "lock"
"""Stage of a probe of Python's lock: the time until a thread that has released the lock has it again."""


LOCK_PAUSE_FACTOR = 128
"""Probes take at most one part in this many of the time: a probe among busy threads waits for milliseconds."""


SWITCHES = ".switches"
"""Suffix of the stage of a span on a counter: how often the thread of the loop stopped to wait."""


NBYTES = ".nbytes"
"""Suffix of the stage of a span on a counter: the bytes that a part of a stage has read."""


FILES = "files"
"""Prefix of counters of what a worker has read from files and pipes, by whatever code."""


PLACES = ".places"
"""Suffix of the stage of a span on a counter: the places of a padded batch, padding included."""


BATCH = "batch"
"""Prefix of counters of whole batches, as the loop receives them."""


PARTS = "parts"
"""Stage of a span over a batch whose parts were timed."""


CPU_EVERY_NS = 4_000_000
"""Time between two measurements of CPU time by a thread.

A batch that is measured reads its clocks seven times; each is a system call of half a microsecond, together a
thousandth of this time.
"""


MOST_PARTS = 16
"""Parts of a stage that are kept separate. Further ones count as a part of the last."""


CPU_SWITCHES = 32
"""Switches between parts at which the CPU clock is read. The rest of a batch is assumed to be like its beginning."""


SWITCH_NS, CPU_SWITCH_NS, REST = 80, 500, 250
"""Nanoseconds of a switch between parts, and of a switch that reads the CPU clock. After a timed batch, no batch is
timed for `REST` times the cost of its switches.

Samples may be so small that clocks around each of their parts would take a tenth of their time.
"""


RUN_DELAY_EVERY_NS = 100_000_000
"""Time between two readings of the run delay and of the bytes read; each opens a file."""


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

Every batch creates a few, and a plain tuple takes a fifth of the time.
"""


@dataclass(slots=True)
class _PartSum:
    number: int = 0
    total_ns: int = 0
    cpu_wall_ns: int = 0
    cpu_ns: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class PartFrame:
    """Parts of one batch.

    A batch within another one, built by a dataset, has a frame of its own.
    """

    spans: list[SpanTuple]
    timed: bool
    has_cpu: bool
    begun_ns: int
    mark_ns: int = 0
    cpu_mark_ns: int = 0
    switches: int = 0
    cpu_switches: int = 0
    sums: dict[str, _PartSum] = field(default_factory=dict)
    open: list[_PartSum] = field(default_factory=list)

    def sum_of(self, stage: str) -> _PartSum:
        """The sum of a part."""
        if stage not in self.sums and len(self.sums) == MOST_PARTS:
            return list(self.sums.values())[-1]
        return self.sums.setdefault(stage, _PartSum())


class Recorder:
    """Spans and clocks of one thread.

    A batch calls `begin`, then `end` after each stage but the last one, then `finish`. The CPU clock is read once in
    `CPU_EVERY_NS`.
    """

    __slots__ = (
        "_cpu_ns", "_frames", "_has_parts", "_mark_ns", "delay_ns", "files_nbytes", "next_cpu_ns", "next_delay_ns",
        "next_parts_ns", "own_process", "spans", "worker",
    )  # fmt: skip

    def __init__(self) -> None:
        self.spans: list[SpanTuple] | None = None
        self.worker = MAIN
        self.own_process = self._has_parts = False
        self.next_cpu_ns = self.next_delay_ns = self.next_parts_ns = self._mark_ns = 0
        self.delay_ns = self.files_nbytes = self._cpu_ns = -1
        self._frames: list[PartFrame] = []

    def begin(self) -> list[SpanTuple] | None:
        """Start the first stage of a batch.

        Its spans go to a new list. Returns the previous list, to be set again after the batch, or after an error.
        """
        outer = self.spans
        self._drop_stale_frames()
        spans: list[SpanTuple] = []
        self.spans = spans
        self._mark_ns, self._cpu_ns = monotonic_ns(), -1
        if self._mark_ns >= self.next_cpu_ns:
            self.next_cpu_ns = self._mark_ns + CPU_EVERY_NS
            self._cpu_ns = self._cpu_time_ns()
        _current.recorder = self
        self._frames.append(PartFrame(spans, self._mark_ns >= self.next_parts_ns, self._cpu_ns >= 0, self._mark_ns))
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
        frame = self.timed_frame()
        if frame is not None:
            self._append_parts(frame, before)

    def finish(self, stage: str, outer: list[SpanTuple] | None) -> list[SpanTuple]:
        """End the last stage, and return the spans.

        `outer` is the result of `begin`.
        """
        self.end(stage)
        recorded, frame = self.spans, self.timed_frame()
        assert recorded is not None
        if frame is not None and self._has_parts:
            recorded.append((PARTS, frame.begun_ns, self._mark_ns, self.worker))
            cost_ns = frame.switches * SWITCH_NS + frame.cpu_switches * CPU_SWITCH_NS
            self.next_parts_ns = frame.begun_ns + max(CPU_EVERY_NS, REST * cost_ns)
        if self._mark_ns >= self.next_delay_ns:
            add_run_delay(recorded, self._mark_ns)
        self.spans = outer
        self._drop_stale_frames()
        return recorded

    def timed_frame(self) -> PartFrame | None:
        """The frame of the current batch, if its parts are timed."""
        self._drop_stale_frames()
        return self._frames[-1] if self._frames and self._frames[-1].timed else None

    def enter(self, frame: PartFrame, stage: str) -> None:
        """Begin a part; a part around it pauses."""
        self._change(frame)
        self._has_parts = True
        frame.open.append(frame.sum_of(stage))
        frame.open[-1].number += 1

    def leave(self, frame: PartFrame) -> None:
        """End a part."""
        if frame.open:  # else it was begun before the batch
            self._change(frame)
            frame.open.pop()

    def claim(self, frame: PartFrame, stage: str, elapsed_ns: int, nbytes: int) -> None:
        """Move time of the innermost part to another one."""
        part, inner = frame.sum_of(stage), frame.open[-1]
        part.number += 1
        part.total_ns += elapsed_ns
        part.nbytes += nbytes
        inner.total_ns -= elapsed_ns
        if frame.has_cpu and 0 < frame.cpu_switches < CPU_SWITCHES:
            inner.cpu_wall_ns -= elapsed_ns

    def _change(self, frame: PartFrame) -> None:
        """Count the time since the last change for the innermost part."""
        reads_cpu = frame.has_cpu and frame.cpu_switches < CPU_SWITCHES
        cpu_ns = self._cpu_time_ns() if reads_cpu else 0
        now_ns = monotonic_ns()
        if frame.open:
            inner = frame.open[-1]
            inner.total_ns += now_ns - frame.mark_ns
            if reads_cpu and frame.cpu_switches:  # the first switch only marks the clock
                inner.cpu_wall_ns += now_ns - frame.mark_ns
                inner.cpu_ns += cpu_ns - frame.cpu_mark_ns
        frame.mark_ns, frame.cpu_mark_ns = now_ns, cpu_ns
        frame.switches += 1
        frame.cpu_switches += reads_cpu

    def _append_parts(self, frame: PartFrame, start_ns: int) -> None:
        """Append spans of the parts, in sequence from their stage's start."""
        assert self.spans is not None
        for stage, part in frame.sums.items():
            if not part.number:
                continue
            self.spans.append((stage, start_ns, start_ns + part.total_ns, self.worker))
            start_ns += part.total_ns
            if part.cpu_wall_ns > 0:
                self.spans.append((stage + CPU, 0, part.cpu_ns * part.total_ns // part.cpu_wall_ns, self.worker))
            if part.nbytes:
                self.spans.append((stage + NBYTES, 0, part.nbytes, self.worker))
            part.number = part.total_ns = part.cpu_wall_ns = part.cpu_ns = part.nbytes = 0

    def _drop_stale_frames(self) -> None:
        """Drop frames of batches that ended with an error."""
        while self._frames and self._frames[-1].spans is not self.spans:
            self._frames.pop()

    def _cpu_time_ns(self) -> int:
        return process_time_ns() if self.own_process else thread_time_ns()


def new_recorder() -> Recorder:
    """A recorder: native where possible, in a third of the time."""
    if native is not None and hasattr(native, "Recorder"):
        recorder: Recorder = native.Recorder(CPU_EVERY_NS, (CPU, NBYTES), PARTS, add_run_delay)
        return recorder
    return Recorder()


class _Current(threading.local):
    recorder: Recorder | None = None


_current = _Current()


def recorder_of_batches() -> Recorder | None:
    """The recorder that this thread's latest batch began with, or None."""
    return _current.recorder


class HelperThreads:
    """CPU time and run delay of all other threads of a process."""

    def __init__(self) -> None:
        self._cpu_ns: int | None = None
        self._read: dict[str, tuple[int, int]] = {}

    def advance(self) -> tuple[int, int]:
        """CPU time and run delay since the last call, in ns.

        (0, 0) while they hardly compute. Of threads that have ended, only the CPU time is known: they count as delayed
        like those that were found.
        """
        # After a fork the clocks begin again, and are behind the last reading.
        before_ns, self._cpu_ns = self._cpu_ns, process_time_ns() - thread_time_ns()
        if before_ns is None:  # what they did before the first call does not count
            self._read = _schedules_of_others()
            return 0, 0
        cpu_ns = self._cpu_ns - before_ns
        if cpu_ns < _LEAST_HELP_NS:
            return 0, 0
        before, self._read = self._read, _schedules_of_others()
        gains = [
            (ran_ns - before.get(thread, (0, 0))[0], delayed_ns - before.get(thread, (0, 0))[1])
            for thread, (ran_ns, delayed_ns) in self._read.items()
        ]
        ran_ns, delayed_ns = (sum(gain) for gain in zip(*gains, strict=True)) if gains else (0, 0)
        return cpu_ns, delayed_ns * max(cpu_ns, ran_ns) // ran_ns if ran_ns > 0 else 0


_LEAST_HELP_NS = RUN_DELAY_EVERY_NS // 20
"""CPU time of other threads between two readings below which they do not matter."""


_TASKS = Path("/proc/self/task")


def _schedules_of_others() -> dict[str, tuple[int, int]]:
    """CPU time and run delay of each other thread, in ns."""
    schedules = {}
    with suppress(OSError):
        for thread in _TASKS.iterdir():
            # A thread may end meanwhile, and some kernels do not count.
            with suppress(OSError, ValueError), open(thread / "schedstat", "rb", buffering=0) as file:
                ran_ns, delayed_ns = map(int, file.read().split()[:2])
                schedules[thread.name] = ran_ns, delayed_ns
    schedules.pop(str(threading.get_native_id()), None)
    return schedules


class _Threads(threading.local):
    """The recorder of each thread.

    An access to thread-local data takes as long as ten to an object, so a batch makes few of them.
    """

    def __init__(self) -> None:
        self.recorder = new_recorder()
        self.helpers = HelperThreads()


def _own_recorder() -> Recorder:
    return _threads.recorder


recorder_of_thread: Callable[[], Recorder] = getattr(native, "recorder_of_thread", _own_recorder)
"""Returns the recorder of this thread."""


if native is not None and recorder_of_thread is not _own_recorder:
    native.own_recorders(_own_recorder)


def set_worker(worker: int, *, own_process: bool = False) -> None:
    """Assign the further spans of this thread to `worker`.

    In a process of its own, the CPU time of a span includes threads that the worker has started.
    """
    _threads.recorder.worker = worker
    if own_process:
        _threads.recorder.own_process = True


def add_run_delay(spans: list[SpanTuple], now_ns: int, *, among_threads: bool = False, step_threads: int = 0) -> None:
    """Append the run delay and the bytes read since the last reading.

    They are read once in `RUN_DELAY_EVERY_NS`, or less often where that takes long. In a worker that is a thread, a
    `LOCK` span is appended, too; in a worker process, the CPU time of `HELPERS`, with their run delay added.
    The others are for the loop: `among_threads` is True if its workers are threads, and `step_threads` is the number of
    threads that compute steps with it, whose run delay is appended, too.
    """
    current = _threads.recorder
    if now_ns < current.next_delay_ns:
        return
    probe_ns = 0
    if _HAS_LOCK and (among_threads or is_worker_thread()):
        probe = _lock_wait(current.worker)
        spans.append(probe)
        probe_ns = probe[2] - probe[1]
    helped_ns = helpers_delay_ns = 0
    if current.own_process or step_threads:
        began_ns = monotonic_ns()
        helped_ns, helpers_delay_ns = _threads.helpers.advance()
        probe_ns = monotonic_ns() - began_ns
        if step_threads:
            spans.append((STEP_THREADS_DELAY, 0, helpers_delay_ns // step_threads, current.worker))
            helpers_delay_ns = 0
        elif helped_ns:
            spans.append((HELPERS + CPU, 0, helped_ns, current.worker))
    current.next_delay_ns = now_ns + max(RUN_DELAY_EVERY_NS, LOCK_PAUSE_FACTOR * probe_ns)
    before, current.delay_ns = current.delay_ns, run_delay_ns()
    if 0 <= before <= current.delay_ns:
        spans.append((RUN_DELAY, before, current.delay_ns + helpers_delay_ns, current.worker))
    before, current.files_nbytes = current.files_nbytes, _files_nbytes(own_process=current.own_process)
    if 0 <= before <= current.files_nbytes:
        spans.append((FILES + NBYTES, before, current.files_nbytes, current.worker))


def run_delay_ns() -> int:
    """Nanoseconds in which this thread was ready but did not run.

    -1 where the kernel does not count them.
    """
    # A file object closes itself even if an interrupt comes before the `with`.
    with suppress(OSError, IndexError, ValueError), open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
        return int(file.read().split()[1])
    return -1


def _files_nbytes(*, own_process: bool) -> int:
    """Bytes that this thread has read from files and pipes.

    With `own_process`, those of its whole process. Mapped files are not counted. -1 where the kernel does not count
    bytes.
    """
    path = "/proc/self/io" if own_process else "/proc/thread-self/io"
    with suppress(OSError, IndexError, ValueError), open(path, "rb", buffering=0) as file:
        return int(file.read(_RCHAR_END).split(maxsplit=2)[1])  # "rchar: 4096", the first line
    return -1


_RCHAR_END = 64
"""Bytes of the file that contain its first line."""


def _lock_wait(worker: int) -> SpanTuple:
    """Release Python's lock, and take it again.

    Other threads that compute in Python keep it for milliseconds. Threads that wait, or compute outside Python, do not
    hold it. Time in which other programs had the CPUs does not count.
    """
    delay_ns, start_ns = run_delay_ns(), monotonic_ns()
    sleep(_LONG_ENOUGH_S)
    stop_ns = monotonic_ns()
    return (LOCK, start_ns, max(stop_ns - max(run_delay_ns() - delay_ns, 0), start_ns), worker)


_LONG_ENOUGH_S = 50e-6
"""Sleep in which a waiting thread can take the lock: after a shorter system call, the thread has the lock again before
others wake up.
"""


_HAS_LOCK = getattr(sys, "_is_gil_enabled", lambda: True)()


def waits_of_thread() -> int:
    """Number of times that this thread has stopped to wait.

    0 where the kernel does not count it.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if _COUNTS_WAITS else 0


_COUNTS_WAITS = hasattr(resource, "RUSAGE_THREAD")


def is_worker_thread() -> bool:
    """True in a worker that is a thread of the training process."""
    return _threads.recorder.worker != MAIN and torch_worker._worker_info is None


_threads = _Threads()
