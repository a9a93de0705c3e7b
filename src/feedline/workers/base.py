"""The protocols of worker pools: what a pool offers, what it is opened with, and the facts about its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from feedline.core.batch import BatchResult
from feedline.core.tensors import Allocator, allocate_tensor
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


class Closeable(Protocol):
    """Something that is open until it is closed."""

    def close(self) -> None:
        """End it. May be called more than once."""


C = TypeVar("C", bound=Closeable)


class Retained:
    """Resources that outlive one pool, one per factory; the loader that owns them closes them."""

    def __init__(self) -> None:
        self._resources: dict[Callable[[], Any], Closeable] = {}

    def get(self, factory: Callable[[], C]) -> C:
        """The resource of this factory, which is called once until `close`."""
        if factory not in self._resources:
            self._resources[factory] = factory()
        return self._resources[factory]  # type: ignore[return-value]

    def close(self) -> None:
        """Close every resource. `get` may be called again afterwards."""
        while self._resources:
            self._resources.popitem()[1].close()


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What a loader asks of a pool that it opens."""

    num_workers: int
    partitions: bool = False
    """Requests of one partition (`request.partition`) must be built in order, one at a time, by one worker."""
    timeout_s: float = 0
    """The longest wait for one batch before `WorkerStalledError`; 0 for no limit."""
    recovery: Recovery = field(default_factory=Recovery)
    unseeded: bool = False
    """Random values come from the workers' own generators, as in torch: batch b belongs to worker b modulo
    `num_workers`, and the replacement of a dead worker continues with its generators."""
    base_seed: int = 0
    """Worker processes seed their global generators with `base_seed + worker_id`, as torch's do."""
    worker_init_fn: Callable[[int], object] | None = None
    """Called once in every worker with its id. Given only to kinds that name it in `accepts`."""
    multiprocessing_context: Any = None
    """The user's context. Given only to kinds that name it in `accepts`."""
    allocate: Allocator = allocate_tensor
    """Allocates the tensors of batches that are built in the training process. Thread-safe."""
    restores_rng: bool = False
    """The builder seeds the global generators: building in the training process must put them back."""
    register_memory: Callable[[int, int], object] | None = None
    """Called with address and size in bytes of memory that will hold batches, once, before the first of them."""
    unregister_memory: Callable[[int], object] | None = None
    """Called with the address of registered memory before it is unmapped, in any thread."""
    retained: Retained = field(default_factory=Retained)
    """Resources that pools of the same loader share, one after the other."""


@dataclass(frozen=True, slots=True)
class PoolKind:
    """How to open a kind of worker pool, and the facts about it that the loader decides by."""

    open: Callable[[Builder, PoolOptions], WorkerPool]
    shares_rng: bool = False
    """Workers build at the same time in the training process: they share its random generators and Python's lock."""
    needs_pickle: bool = False
    """Builder and batches cross a process border: both are pickled."""
    works_ahead: bool = True
    """Batches are built before the loop asks for them. Only kinds that do so can be chosen by name."""
    hosts_partitions: bool = False
    """A worker may serve several partitions of a stream that asks `torch.utils.data.get_worker_info()` for its part."""
    splits_batches: bool = False
    """Native threads may work on one batch: two workers with many threads each serve better than many workers."""
    resizable: bool = True
    """`resize` changes the number of workers, so `num_workers="auto"` may follow the load."""
    accepts: frozenset[str] = frozenset()
    """Arguments of the loader that other kinds refuse: "worker_init_fn", "multiprocessing_context"."""
    prepare: Callable[[], object] | None = None
    """Starts in the background what pools will need; called when a loader without a context of the user's is made."""
