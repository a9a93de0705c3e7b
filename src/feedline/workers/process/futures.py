"""Futures of requests submitted to worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from feedline.core.batch import BatchResult, SkippedSample
from feedline.errors import WorkerError
from feedline.workers.transport import forks


class FutureOwner(Protocol):
    """Pool, as far as its futures use it."""

    def poll(self, future: ProcessFuture) -> bool:
        """Handle pending events; True if the future is settled then."""

    def wait_briefly(self, future: ProcessFuture, limit_s: float) -> bool:
        """Wait for at most `limit_s` seconds; True if the future is settled."""

    def wait_for(self, future: ProcessFuture) -> None:
        """Wait until the future is settled."""

    def drop(self, future: ProcessFuture) -> None:
        """Forget a canceled future. Called by finalizers: takes no lock."""


class ProcessFuture:
    """Future of a request to worker processes; see `BatchFuture`.

    A request may be built twice; the later result is dropped.
    """

    __slots__ = (
        *("_error", "_pool", "_result", "_slots", "request", "settled", "skipped", "strikes", "task", "trial", "work"),
    )

    def __init__(self, pool: FutureOwner, task: int, request: Any, *, trial: bool = False) -> None:
        self._pool, self.task, self.request, self.trial = pool, task, request, trial
        self.work = request
        """The request as sent to workers: without samples known to kill them."""
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
        """Wait for at most `limit_s` seconds; True if it is settled."""
        return self.settled or self._pool.wait_briefly(self, limit_s)

    def result(self) -> BatchResult:
        """See `BatchFuture`."""
        if not self.settled:
            self._pool.wait_for(self)
        error, self._error = self._error, None
        if error is not None:
            raise error
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
        """Settle with a batch in these slots of shared memory."""
        self._slots = slots
        self._result = built._replace(skipped=built.skipped + self.skipped) if self.skipped else built
        self.settled = True

    def fail(self, error: BaseException) -> None:
        """Settle with an error."""
        self._error = error
        self.settled = True
