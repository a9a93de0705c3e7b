"""The seam between the engine and the places where builders run.

How much trouble with worker processes is borne before it becomes an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from feedline.core.batch import BatchResult
from feedline.core.tensors import Allocator
from feedline.errors import ArgumentError

Builder = Callable[[Any, Allocator], BatchResult]
"""What a pool runs: `builder(request, empty)`, pure in the request."""


class BatchFuture(Protocol):
    """One submitted request."""

    @property
    def request(self) -> Any:
        """The request that was submitted."""

    def done(self) -> bool:
        """Whether `result()` would return, or raise, at once."""

    def result(self) -> BatchResult:
        """What the builder gave; waits for it. Raises what the builder raised, or a `WorkerError`."""

    def cancel(self) -> None:
        """Drop the request, or its result if it is already on its way. Never raises."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A moment's picture of a worker pool."""

    workers: int = 0
    """Workers that are alive."""
    in_flight: int = 0
    """Requests submitted and not yet answered."""
    restarts: int = 0
    """Workers that died and were replaced since the pool was opened."""
    arena_nbytes: int = 0
    """Bytes of transport memory that the workers hold."""
    lent_nbytes: int = 0
    """Bytes of it that batches still occupy: in flight, or kept by the training loop."""
    pids: tuple[int, ...] = ()
    """Process ids of the workers; empty for threads and inline."""


class WorkerPool(Protocol):
    """Runs one builder on many requests. A context manager: leaving it joins every worker."""

    @property
    def processes(self) -> list[Any]:
        """The worker processes, each with `pid` and `is_alive()`; none for threads and inline."""

    def submit(self, request: Any) -> BatchFuture:
        """Hand in a request; returns at once."""

    def wait_any(self, tickets: Iterable[Any]) -> Any:
        """The first of these tickets, all of this pool, that is done; waits for one."""

    def resize(self, num_workers: int) -> None:
        """Grow or shrink while requests are in flight; no request is lost."""

    def statistics(self) -> PoolStatistics:
        """Workers, requests and bytes at this moment."""

    def close(self) -> None:
        """Cancel what is in flight and join every worker. May be called more than once."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a loader bears from its worker processes; the stream of batches is the same whatever happens within it."""

    deaths_per_epoch: int = 3
    """Workers that may die in one epoch. Each is replaced and its request given to another; one more is an error."""
    stall_s: float = 60.0
    """How long the loop waits for a batch before the stack and the current sample of every worker are logged."""

    def __post_init__(self) -> None:
        if self.deaths_per_epoch < 0:
            raise ArgumentError(f"deaths_per_epoch must not be negative; got {self.deaths_per_epoch}")
        if self.stall_s <= 0:
            raise ArgumentError(f"stall_s must be positive; got {self.stall_s}")
