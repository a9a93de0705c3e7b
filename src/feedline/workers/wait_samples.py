"""Samples of the waits of workers while they build batches."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from math import inf
from threading import get_native_id
from time import monotonic, thread_time

from feedline.core.proc import ThreadWait, wait_of_thread, waits_for_lock


class SampleTimes:
    """Times for samples of workers, within the loop's waits.

    Workers that build and wait for each other repeat the same states from batch to batch, so a sample must not depend
    on when a batch arrives, nor on how long a wait is. Samples are therefore due at times of a clock of their own. If
    such a time passes while the loop does not wait, another one follows the begin of the next wait.
    """

    def __init__(self) -> None:
        self._usual_s = self._due_s = 0.0
        self._pause_s = _LEAST_PAUSE_S
        self._turn = 0

    def next_s(self) -> float:
        """Time of the next sample, by `monotonic`.

        The wait may end before it. Infinite if the loop hardly waits.
        """
        if self._usual_s < _LEAST_WAIT_S:
            return inf
        if (now_s := monotonic()) > self._due_s:
            self._set_due(now_s, 0.0)
        return self._due_s

    def add_wait(self, elapsed_s: float) -> None:
        """Update the usual length of a wait."""
        self._usual_s += (elapsed_s - self._usual_s) / _REMEMBERED

    def _end_sample(self, began_s: float) -> None:
        """Pause after a sample.

        `began_s` is the CPU time of this thread at its begin.
        """
        # Without the time in which other programs have the CPU: on a busy machine there would be hardly any samples.
        self._pause_s = max(_LEAST_PAUSE_S, _PAUSE_FACTOR * (thread_time() - began_s))
        self._set_due(monotonic(), self._pause_s)

    def _set_due(self, now_s: float, least_s: float) -> None:
        """Set the time of the next sample, at least `least_s` from now."""
        self._turn += 1
        self._due_s = now_s + least_s + self._pause_s * (self._turn * GOLDEN % 1.0)


class ProcessSamples(SampleTimes):
    """Samples of worker processes, for all pools of a loader."""

    def __init__(self) -> None:
        super().__init__()
        self._number = self._contended = self._workers = 0

    def take(self, building: Iterable[int], workers: int) -> None:
        """Take a sample of the processes that are building a batch.

        `building` are their process ids. If `workers`, the number of workers, has changed, counting starts again.
        """
        began_s = thread_time()
        if workers != self._workers:
            self._workers, self._number, self._contended = workers, 0, 0
        found = [waits for pid in building if (waits := waits_for_lock(pid)) is not None]
        self._number, self._contended = self._number + len(found), self._contended + sum(found)
        self._end_sample(began_s)

    @property
    def contended_share(self) -> float | None:
        """Share of building time spent on locks of other workers.

        None before enough samples.
        """
        number = self._number  # another thread may start from zero meanwhile
        return min(self._contended / number, 1.0) if number >= _LEAST_SAMPLES else None

    def close(self) -> None:
        """Do nothing: samples hold no resources."""


class ThreadSamples(SampleTimes):
    """Samples of the threads in `building`, which are building a batch.

    They are taken while the loop waits for a batch. It then holds Python's lock: a thread that computes, or is ready
    to, waits for that lock. In turn, a thread that has built a batch, and holds the lock, samples the step of the loop.
    """

    def __init__(self, building: AbstractSet[int]) -> None:
        super().__init__()
        self._building = building
        self._number = self._contended = self._outside = 0
        self._waiters: dict[int, set[int]] = {}
        self._stepping = 0
        self._step_due_s = 0.0
        self._steps = self._steps_outside = 0

    def begin_step(self) -> None:
        """The calling thread, that of the loop, has a batch."""
        self._stepping = get_native_id()

    def end_step(self) -> None:
        """The loop waits for a batch."""
        self._stepping = 0

    def take_of_step(self) -> None:
        """Take a sample of the loop, for the thread of a worker."""
        if not self._stepping or monotonic() < self._step_due_s:
            return
        # Its wall time contains the wait for the lock, in which others work.
        began_s = thread_time()
        # Reading the state gives the lock back for a moment: a loop that waits for it then counts as running.
        if (found := wait_of_thread(self._stepping)) is not None:
            self._steps += 1
            self._steps_outside += found.is_outside
        self._step_due_s = monotonic() + max(_LEAST_PAUSE_S, _PAUSE_FACTOR * (thread_time() - began_s))

    def take(self) -> None:
        """Take a sample of the threads that are building a batch."""
        began_s = thread_time()
        for thread in tuple(self._building):
            if (found := wait_of_thread(thread)) is not None:
                self._count(thread, found)
        self._end_sample(began_s)

    def _count(self, thread: int, found: ThreadWait) -> None:
        self._number += 1
        if found.address and self._is_shared(found.address, thread):
            self._contended += 1
        elif found.is_outside:
            self._outside += 1

    def _is_shared(self, address: int, thread: int) -> bool:
        """True if several workers have waited for the lock at this address.

        A thread that waits for its own helper threads, such as those of a library, waits at an address of its own.
        """
        if len(self._waiters) >= _MOST_LOCKS and address not in self._waiters:
            self._waiters.clear()
        waiters = self._waiters.setdefault(address, set())
        waiters.add(thread)
        return len(waiters) > 1

    @property
    def contended_share(self) -> float | None:
        """Share of building time spent on locks of other workers.

        None before enough samples.
        """
        return self._contended / self._number if self._number >= _LEAST_SAMPLES else None

    @property
    def outside_share(self) -> float | None:
        """Share of building time spent on files, networks and own threads.

        Waits for Python's lock do not count. None before enough samples.
        """
        return self._outside / self._number if self._number >= _LEAST_SAMPLES else None

    @property
    def step_outside_share(self) -> float | None:
        """Share of a step's waits that are not for Python's lock.

        They are for a device, for example. None before enough samples.
        """
        return self._steps_outside / self._steps if self._steps >= _LEAST_SAMPLES else None


_LEAST_SAMPLES = 16


_LEAST_WAIT_S = 0.0005
"""Usual wait below which no samples are taken: the loop hardly waits for its workers."""


_REMEMBERED = 8
"""Number of latest waits that determine the usual length."""


GOLDEN = 0.6180339887
"""Inverse of the golden ratio: the fractional parts of its multiples cover the interval from 0 to 1 evenly."""


_LEAST_PAUSE_S = 0.02
"""Shortest pause between two samples, in seconds."""


_PAUSE_FACTOR = 200
"""Shortest pause after a sample, in multiples of the sample's duration: samples take at most 1/200 of the time."""


_MOST_LOCKS = 256
