"""Pool without workers: batches are built in the training process on demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Self

from feedline.core.batch import BatchResult
from feedline.core.rng_globals import restoring_globals
from feedline.core.tensors import Allocator, allocate_tensor
from feedline.errors import WorkerError
from feedline.workers.base import Builder, PoolStatistics

_IDLE = PoolStatistics()


class InlineFuture:
    """Future whose batch is built by the first `result()`."""

    __slots__ = ("_is_over", "_pool", "_result", "request")

    def __init__(self, pool: InlinePool, request: Any) -> None:
        self._pool, self.request = pool, request
        self._result: BatchResult | None = None
        self._is_over = False

    def done(self) -> bool:
        """Always True: `result()` builds and never waits for a worker."""
        return True

    def result(self) -> BatchResult:
        """Build the batch on the calling thread; see `BatchFuture`.

        After an interrupt of the builder, the next call builds it again.
        """
        if self._result is None:
            if self._is_over:
                raise WorkerError(f"{self.request} was canceled, or its error was raised before")
            try:
                self._result = self._pool.build(self.request)
            except Exception:
                self._end()
                raise
        # As `_end`, but without a call for each batch. Also after a result of an earlier call: an interrupt may have
        # come before these lines.
        self._is_over = True
        self._pool.unanswered.discard(self)
        return self._result

    def cancel(self) -> None:
        """See `BatchFuture`."""
        self._result = None
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._pool.unanswered.discard(self)


class InlinePool:
    """Pool that builds on the calling thread, into memory from `allocate`.

    `isolate` restores the global random generators after each batch, for builders that reseed them.
    """

    def __init__(self, builder: Builder, *, isolate: bool = False, allocate: Allocator = allocate_tensor) -> None:
        self._builder, self._isolate, self._allocate = builder, isolate, allocate
        self.unanswered: set[InlineFuture] = set()
        """Futures without a batch, an error or a cancellation."""

    def submit(self, request: Any) -> InlineFuture:
        """Return a future whose `result()` builds the batch."""
        future = InlineFuture(self, request)
        self.unanswered.add(future)
        return future

    def build(self, request: Any) -> BatchResult:
        """Build the batch of a request on the calling thread."""
        if not self._isolate:
            return self._builder(request, self._allocate)
        with restoring_globals():
            return self._builder(request, self._allocate)

    def open(self, request: Any) -> None:
        """Let a builder of streams open that of the request."""
        builder: Any = self._builder
        with restoring_globals() if self._isolate else nullcontext():
            builder.open(request)

    def opened_states(self, run: int, epoch: int) -> Mapping[int, Any]:
        """The states of streams that were opened, but not read."""
        builder: Any = self._builder
        states: Mapping[int, Any] = builder.opened_states(run, epoch)
        return states

    def wait_any(self, futures: Iterable[InlineFuture]) -> InlineFuture:
        """Return the first future."""
        return next(iter(futures))

    def resize(self, num_workers: int) -> None:
        """Do nothing: there are no workers."""

    @property
    def processes(self) -> list[Any]:
        """Always empty."""
        return []

    def statistics(self) -> PoolStatistics:
        """Number of requests; all other figures are zero."""
        return PoolStatistics(in_flight=len(self.unanswered)) if self.unanswered else _IDLE

    @property
    def holds_streams(self) -> bool:
        """True if the builder keeps streams open, until `close`."""
        return hasattr(self._builder, "close")  # other builders hold nothing open

    def close(self) -> None:
        """Let a builder of streams drop those that are open."""
        builder: Any = self._builder
        if self.holds_streams:
            builder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
