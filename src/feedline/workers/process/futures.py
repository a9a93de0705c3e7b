"""Futures of requests to worker processes, and the pools that settle them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from time import monotonic
from typing import Any, Self

from feedline.core import finalizers
from feedline.core.batch import BatchResult, SkippedSample
from feedline.errors import WorkerError
from feedline.workers.transport import forks


class ProcessFuture:
    """Future of a request to worker processes; see `BatchFuture`.

    A request may be built twice; the later result is dropped.
    """

    __slots__ = (
        *("_error", "_pool", "_result", "_slots", "request", "settled", "skipped", "strikes", "task", "trial", "work"),
    )

    def __init__(self, pool: FuturePool, task: int, request: Any, *, trial: bool = False) -> None:
        self._pool, self.task, self.request, self.trial = pool, task, request, trial
        self.work = request
        """Request to send to workers: without samples known to kill them."""
        self.settled = False
        self.strikes = 0
        self.skipped: tuple[SkippedSample, ...] = ()
        self._result: BatchResult | None = None
        self._slots: Sequence[Any] = ()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """See `BatchFuture`."""
        return self.settled or self._pool.poll(self)

    def wait(self, limit_s: float) -> bool:
        """Wait for at most `limit_s` seconds; True if the future is settled."""
        return self.settled or self._pool.wait_briefly(self, limit_s)

    def result(self) -> BatchResult:
        """See `BatchFuture`."""
        if not self.settled:
            self._pool.wait_for(self)
        error, self._error = self._error, None
        if error is not None:
            raise error  # not kept: the traceback that it gets refers to this future
        built = self._result
        if built is None:
            raise WorkerError(f"{self.request} was canceled, or its error was raised before")
        slots, self._slots = self._slots, ()
        if slots:
            forks.add_delivered(slots)
        return built

    def cancel(self) -> None:
        """See `BatchFuture`."""
        self._result = self._error = None
        self.settled = True
        self._pool.drop(self)

    def succeed(self, built: BatchResult, slots: Sequence[Any] = ()) -> None:
        """Settle with a batch whose memory is in `slots`."""
        self._slots = slots
        self._result = built._replace(skipped=built.skipped + self.skipped) if self.skipped else built
        self.settled = True

    def fail(self, error: BaseException) -> None:
        """Settle with an error."""
        self._error = error
        self.settled = True


class FuturePool:
    """Pool whose work is done inside its calls, which are serialized.

    Subclasses define `_wait`, `_step` and `_close`. `workers` names its workers in errors. Only the process that made
    the pool may use it.
    """

    _closed = True  # for `__del__` after an interrupt in the constructor

    def __init__(self, workers: str) -> None:
        self._workers = workers
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._error: BaseException | None = None
        self._tasks = count(1)

    @property
    def is_usable(self) -> bool:
        """False once an error or `close` has ended the workers."""
        return self._error is None and not self._closed

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Handle events until `ready()`; raises exceptions of `_check`."""
        raise NotImplementedError

    def _step(self, timeout_s: float) -> bool:
        """Wait for events and handle them; True if there was an answer."""
        raise NotImplementedError

    def _close(self) -> None:
        """End the workers. Called once, by the process that owns them."""
        raise NotImplementedError

    def drop(self, future: ProcessFuture) -> None:
        """Forget a canceled future. Called by finalizers: takes no lock."""
        raise NotImplementedError

    def wait_any(self, futures: Iterable[ProcessFuture]) -> ProcessFuture:
        """See `WorkerPool`."""
        futures = list(futures)
        with self._lock:
            self._wait(lambda: any(future.settled for future in futures))
        return next(future for future in futures if future.settled)

    def poll(self, future: ProcessFuture) -> bool:
        """Handle pending events; True if settled, or if it never will be."""
        if os.getpid() != self._owner:  # a forked child must not take the answers of its parent
            return True
        with self._lock:
            if not self._closed and self._error is None:
                self._step(0)
        return future.settled or not self.is_usable

    def wait_briefly(self, future: ProcessFuture, limit_s: float) -> bool:
        """Wait for at most `limit_s` seconds; True if the future is settled."""
        end_s = monotonic() + limit_s
        with self._lock:
            is_ours = os.getpid() == self._owner
            while is_ours and not (future.settled or self._closed or self._error):
                if (left_s := end_s - monotonic()) <= 0:
                    break
                self._step(left_s)
        return future.settled

    def wait_for(self, future: ProcessFuture) -> None:
        """Wait until the future is settled."""
        with self._lock:
            self._wait(lambda: future.settled)

    def close(self) -> None:
        """End the workers. Idempotent, and without effect in a forked child."""
        if self._closed or os.getpid() != self._owner:  # a forked child must not end its parent's workers
            return
        self._closed = True
        finalizers.run(self._close)  # garbage collection may close it while this thread holds a lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise WorkerError(f"the {self._workers} of this iterator have been closed")
        if os.getpid() != self._owner:
            raise WorkerError(
                f"these {self._workers} belong to process {self._owner}, not to {os.getpid()}, which was forked from "
                "it: call iter(loader) again there"
            )
