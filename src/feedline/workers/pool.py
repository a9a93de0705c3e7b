"""The seam between the engine and the places where builders run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from feedline.builder import Built
from feedline.rows import Empty

Builder = Callable[[Any, Empty], Built]
"""What a pool runs: `builder(request, empty)`, pure in the request."""


class Ticket(Protocol):
    """One submitted request."""

    @property
    def request(self) -> Any:
        """The request that was submitted."""

    def done(self) -> bool:
        """Whether `result()` would return, or raise, at once."""

    def result(self) -> Built:
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

    def submit(self, request: Any) -> Ticket:
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
