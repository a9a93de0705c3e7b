"""No workers: each batch is built in the training process, at the moment the loop asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from feedline.core.batch import BatchResult
from feedline.core.rng_globals import restored_globals
from feedline.core.tensors import Allocator, allocate_tensor
from feedline.workers.base import Builder, PoolStatistics


class InlineFuture:
    """A request that is built when its result is asked for."""

    __slots__ = ("_pool", "request")

    def __init__(self, pool: InlinePool, request: Any) -> None:
        self._pool, self.request = pool, request

    def done(self) -> bool:
        """Always: the work happens in `result`."""
        return True

    def result(self) -> BatchResult:
        """Build the batch now."""
        return self._pool.build(self.request)

    def cancel(self) -> None:
        """Nothing was started."""


class InlinePool:
    """Batches lie in memory from `empty`.

    `isolate` puts the training process's own random generators back after each batch: for builders that reseed.
    """

    def __init__(self, builder: Builder, *, isolate: bool = False, empty: Allocator = allocate_tensor) -> None:
        self._builder, self._isolate, self._empty = builder, isolate, empty

    def submit(self, request: Any) -> InlineFuture:
        """A ticket; nothing happens yet."""
        return InlineFuture(self, request)

    def build(self, request: Any) -> BatchResult:
        """The batch of a request, on the calling thread."""
        if not self._isolate:
            return self._builder(request, self._empty)
        with restored_globals():
            return self._builder(request, self._empty)

    def wait_any(self, tickets: Iterable[InlineFuture]) -> InlineFuture:
        """The oldest ticket."""
        return next(iter(tickets))

    def resize(self, num_workers: int) -> None:
        """There is nothing to resize."""

    @property
    def processes(self) -> list[Any]:
        """None."""
        return []

    def statistics(self) -> PoolStatistics:
        """All zero: no workers, no memory of its own."""
        return PoolStatistics()

    def close(self) -> None:
        """Nothing to join."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
