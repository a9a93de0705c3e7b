"""The number of requests in flight, adapted to what the line and the server carry."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from feedline.core import threads
from feedline.errors import TransientError


class ConcurrencyLimit:
    """A limit on the requests in flight: additive increase, multiplicative decrease.

    It is halved when most of the latest requests failed in a way that may pass, and grows back by about one per round
    of requests that succeed. Until it is lowered nothing waits for it: the threads of a store are the limit then. Safe
    to use from several threads.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._lock = threading.Lock()
        self._busy = 0
        self._waiting: deque[threading.Event] = deque()
        # Requests that were sent before the limit was last lowered do not lower it again: they failed together.
        self._generation = 0
        self._failed: deque[bool] = deque(maxlen=most)

    @property
    def now(self) -> int:
        """The present limit."""
        return int(self._limit)

    @property
    def is_lowered(self) -> bool:
        """Tell whether the line carries less than the most that may be asked."""
        return self._limit < self._most

    @property
    def waiting(self) -> int:
        """The number of threads that wait for a slot."""
        return len(self._waiting)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot for one request; its TransientError counts as a failure.

        WaitCancelledError if the scope of the thread is cancelled while it waits.
        """
        generation, failed = self._take(), None
        try:
            yield
            failed = False
        except TransientError:
            failed = True
            raise
        finally:
            self._release(generation, failed)

    def _take(self) -> int:
        with self._lock:
            if self._has_room():
                self._busy += 1
                return self._generation
            gate = threading.Event()
            self._waiting.append(gate)
        try:
            while gate in self._waiting:
                threads.wait(gate, threads.WAKE_S)
        except BaseException:
            self._leave(gate)
            raise
        return self._generation

    def _leave(self, gate: threading.Event) -> None:
        """Give up waiting, or a slot that was granted meanwhile."""
        with self._lock:
            if gate in self._waiting:
                self._waiting.remove(gate)
                return
        self._release(self._generation, None)

    def _release(self, generation: int, failed: bool | None) -> None:
        with self._lock:
            self._busy -= 1
            if failed is not None and generation == self._generation:
                self._adapt(failed)
            while self._waiting and self._has_room():
                self._busy += 1
                self._waiting.popleft().set()

    def _adapt(self, failed: bool) -> None:
        self._failed.append(failed)
        if not failed:
            self._limit = min(self._most, self._limit + 1 / self._limit)
        elif self._limit > 1 and sum(self._failed) > max(1, len(self._failed) // 2, min(self._busy, self.now) // 2):
            self._limit = max(1.0, self._limit / 2)
            self._generation += 1
            self._failed = deque(maxlen=self.now)

    def _has_room(self) -> bool:
        return not self.is_lowered or self._busy < self.now
