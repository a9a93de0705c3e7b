"""The number of requests in flight, adapted to the line."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from feedline.core import threads
from feedline.errors import TransientError

T = TypeVar("T")


class ConcurrencyLimit:
    """A limit on the requests in flight: additive increase, multiplicative decrease.

    It is halved when most of the latest requests failed with a transient error, and grows back by about one per round
    of successful requests. Until it is lowered, nothing waits for it, and the threads of a store are the limit. Safe to
    use from several threads.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._lock = threading.Lock()
        self._busy = 0
        self._waiting: deque[threading.Event] = deque()
        # Requests sent before the limit was last lowered do not lower it again: all of them failed for the same reason.
        self._generation = 0
        self._failed: deque[bool] = deque(maxlen=most)

    @property
    def now(self) -> int:
        """The current limit."""
        return int(self._limit)

    @property
    def is_lowered(self) -> bool:
        """True if the limit is below its maximum."""
        return self._limit < self._most

    @property
    def waiting(self) -> int:
        """The number of threads that wait for a slot."""
        return len(self._waiting)

    def run(self, request: Callable[[], T]) -> T:
        """Hold a slot while `request()` runs; its TransientError counts as a failure.

        WaitCancelledError if the scope of the thread is canceled while it waits for the slot.
        """
        generation = self._generation
        if self.is_lowered:
            self._take()
            try:
                return self._observe(request, generation)
            finally:
                self._release()
        # Without a lock or a count: every request on a good line passes here.
        return self._observe(request, generation)

    def _observe(self, request: Callable[[], T], generation: int) -> T:
        try:
            result = request()
        except TransientError:
            with self._lock:
                self._note_failure(generation)
            raise
        self._failed.append(False)
        if self.is_lowered:
            with self._lock:
                self._limit = min(self._most, self._limit + 1 / self._limit)
        return result

    def _note_failure(self, generation: int) -> None:
        if generation != self._generation:
            return  # sent before the limit was lowered: this failure has already lowered it
        self._failed.append(True)
        if self._limit > 1 and sum(self._failed.copy()) > max(1, len(self._failed) // 2):
            self._limit = max(1.0, self._limit / 2)
            self._generation += 1
            self._failed = deque(maxlen=self.now)

    def _take(self) -> None:
        with self._lock:
            if self._has_room():
                self._busy += 1
                return
            gate = threading.Event()
            self._waiting.append(gate)
        try:
            # A cancellation sets the gate, too: this thread has a slot only if its gate is no longer in the queue.
            while gate in self._waiting:
                threads.wait(gate, threads.WAKE_S)
        except BaseException:
            self._leave(gate)
            raise

    def _leave(self, gate: threading.Event) -> None:
        """Stop waiting, and release a slot that was granted since then."""
        with self._lock:
            if gate in self._waiting:
                self._waiting.remove(gate)
                return
        self._release()

    def _release(self) -> None:
        with self._lock:
            self._busy -= 1
            while self._waiting and self._has_room():
                self._busy += 1
                self._waiting.popleft().set()

    def _has_room(self) -> bool:
        return not self.is_lowered or self._busy < self.now
