"""Requests on their way through worker processes."""

from __future__ import annotations

from typing import Any, Protocol

from feedline.core.batch import BatchResult, SkippedSample
from feedline.errors import WorkerError


class FutureOwner(Protocol):
    """What a ticket needs of its pool."""

    def look(self, ticket: ProcessFuture) -> bool:
        """Whether the ticket is settled by now; does not wait."""

    def wait_for(self, ticket: ProcessFuture) -> None:
        """Wait until it is."""

    def drop(self, ticket: ProcessFuture) -> None:
        """Nobody wants it any more. Called from finalizers too: takes no lock."""


class ProcessFuture:
    """See `Ticket`. Settled at most once that matters: a request may be built twice, with equal results."""

    __slots__ = ("_built", "_error", "_pool", "request", "settled", "skipped", "strikes", "task", "trial", "work")

    def __init__(self, pool: FutureOwner, task: int, request: Any, *, trial: bool = False) -> None:
        self._pool, self.task, self.request, self.trial = pool, task, request, trial
        self.work = request
        """What workers are asked for: the request, or what is left of it without the samples that kill."""
        self.settled = False
        self.strikes = 0
        self.skipped: tuple[SkippedSample, ...] = ()
        self._built: BatchResult | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """See `Ticket`."""
        return self.settled or self._pool.look(self)

    def result(self) -> BatchResult:
        """See `Ticket`. To be called once: the ticket does not keep the batch."""
        if not self.settled:
            self._pool.wait_for(self)
        error, self._error = self._error, None
        if error is not None:
            raise error
        built, self._built = self._built, None
        if built is None:
            raise WorkerError(f"{self.request} was cancelled, or its result has been taken already")
        return built

    def cancel(self) -> None:
        """See `Ticket`."""
        self._built = self._error = None
        self.settled = True
        self._pool.drop(self)

    def succeed(self, built: BatchResult) -> None:
        """Settle with a batch."""
        self._built = built._replace(skipped=built.skipped + self.skipped) if self.skipped else built
        self.settled = True

    def fail(self, error: BaseException) -> None:
        """Settle with an error."""
        self._error = error
        self.settled = True
