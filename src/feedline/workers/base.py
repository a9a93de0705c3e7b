"""Protocols of worker pools, their options and their kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from feedline.core.batch import BatchResult
from feedline.core.tensors import Allocator, allocate_tensor
from feedline.errors import ArgumentError

Builder = Callable[[Any, Allocator], BatchResult]
"""`builder(request, allocate)` builds the batch of a request; a pure function of the request."""


class BatchFuture(Protocol):
    """Future result of one submitted request."""

    @property
    def request(self) -> Any:
        """The request that was submitted."""

    def done(self) -> bool:
        """True if `result()` would return or raise without waiting."""

    def result(self) -> BatchResult:
        """Wait for the batch and return it.

        A second call returns the same batch, because an interrupt may arrive before the caller has stored it. Drop the
        future to free the batch. Raises the exception of the builder, or a `WorkerError`; a second call then raises
        either of them. After `cancel`, or once the pool is closed, it does not wait.
        """

    def cancel(self) -> None:
        """Drop the request, or its result in transit. Never raises."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Snapshot of a worker pool."""

    workers: int = 0
    """Workers that are alive."""
    in_flight: int = 0
    """Requests submitted, and neither answered nor canceled."""
    restarts: int = 0
    """Workers that died and were replaced since the pool was opened."""
    arena_nbytes: int = 0
    """Bytes of transport memory that the workers hold."""
    lent_nbytes: int = 0
    """Part of `arena_nbytes` that is in use by batches in flight or still referenced by the training loop."""
    pids: tuple[int, ...] = ()
    """Process ids of the workers; empty for threads and inline."""
    status_fd: int = -1
    """Descriptor of the table with the activity of each worker process; -1 if there is none."""
    contended_share: float | None = None
    """Share of building time in which workers wait for a lock that another worker holds; None if unknown."""
    outside_share: float | None = None
    """Share of building time in which worker threads wait for files, networks or their own threads; None if unknown."""
    step_outside_share: float | None = None
    """Share of the waits of steps next to worker threads that are not for Python's lock; None if unknown."""


class WorkerPool(Protocol):
    """Workers that run one builder on many requests.

    A context manager: leaving it closes the pool.
    """

    @property
    def processes(self) -> list[Any]:
        """Worker processes, each with `pid` and `is_alive()`; empty for threads and inline."""

    def submit(self, request: Any) -> BatchFuture:
        """Queue a request; does not wait."""

    def wait_any(self, futures: Iterable[Any]) -> Any:
        """Wait until one of these futures is done; return it.

        All of them must come from this pool.
        """

    def resize(self, num_workers: int) -> None:
        """Change the number of workers; requests in flight are not lost."""

    def statistics(self) -> PoolStatistics:
        """Current numbers of workers, requests and bytes."""

    def close(self) -> None:
        """Cancel requests in flight and join every worker. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Recovery:
    """Limits on failures of worker processes.

    Within these limits the stream of batches is the same as without any failure.
    """

    deaths_per_epoch: int = 3
    """Deaths allowed per epoch: a dead worker is replaced and its request resubmitted. One more death is an error."""
    stall_s: float = 60.0
    """Seconds of waiting for a batch after which the stack and current sample of every worker are logged."""

    def __post_init__(self) -> None:
        if self.deaths_per_epoch < 0:
            raise ArgumentError(f"deaths_per_epoch must not be negative; got {self.deaths_per_epoch}")
        if self.stall_s <= 0:
            raise ArgumentError(f"stall_s must be positive; got {self.stall_s}")


class Closeable(Protocol):
    """Object that holds processes, memory or descriptors until it is closed."""

    def close(self) -> None:
        """Release everything. Idempotent."""


C = TypeVar("C", bound=Closeable)


class RetainedResources:
    """Resources that outlive single pools of one loader, one per factory."""

    def __init__(self) -> None:
        self._resources: dict[Callable[[], Any], Closeable] = {}

    def get(self, factory: Callable[[], C]) -> C:
        """Return the resource of a factory, which is called only once."""
        if factory not in self._resources:
            self._resources[factory] = factory()
        return self._resources[factory]  # type: ignore[return-value]

    def close(self) -> None:
        """Close every resource. `get` may be called again afterwards."""
        while self._resources:
            self._resources.popitem()[1].close()


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options with which a loader opens a pool."""

    num_workers: int
    partitions: bool = False
    """Requests of one partition (`request.partition`) must be built in order, one at a time, by one worker."""
    timeout_s: float = 0
    """Longest wait for a batch, after which `WorkerStalledError` is raised; 0 for no limit."""
    recovery: Recovery = field(default_factory=Recovery)
    unseeded: bool = False
    """Random values come from the workers' own generators, as in torch: batch b belongs to worker b modulo
    `num_workers`, and the replacement of a dead worker starts from the last reported states of that worker."""
    base_seed: int = 0
    """Worker processes seed their global generators with `base_seed + worker_id`, as torch's do."""
    worker_init_fn: Callable[[int], object] | None = None
    """Called once in every worker with its id. Given only to kinds that name it in `accepts`."""
    multiprocessing_context: Any = None
    """The user's context. Given only to kinds that name it in `accepts`."""
    allocate: Allocator = allocate_tensor
    """Allocates the tensors of batches that are built in the training process. Thread-safe."""
    restores_rng: bool = False
    """The builder seeds the global generators: a pool that builds in the training process must restore them."""
    register_memory: Callable[[int, int], object] | None = None
    """Called once per block of batch memory, with address and size in bytes, before its first batch is delivered."""
    unregister_memory: Callable[[int], object] | None = None
    """Called with the address of a registered block before the block is unmapped, in any thread."""
    retained: RetainedResources = field(default_factory=RetainedResources)
    """Resources that successive pools of the same loader share."""


@dataclass(frozen=True, slots=True)
class PoolKind:
    """Kind of worker pool: its constructor, and facts for the loader's decisions."""

    open: Callable[[Builder, PoolOptions], WorkerPool]
    shares_rng: bool = False
    """Workers run concurrently in the training process: they share its random generators and Python's lock."""
    needs_pickle: bool = False
    """Workers are other processes: builder and batches are pickled."""
    works_ahead: bool = True
    """Batches are built before the loop needs them. Only such kinds can be chosen by name."""
    hosts_partitions: bool = False
    """A worker can read several partitions of a stream that shards itself by `torch.utils.data.get_worker_info()`."""
    splits_batches: bool = False
    """Native threads may build one batch together: two workers with many threads are then better than many workers."""
    resizable: bool = True
    """`resize` changes the number of workers, so `num_workers="auto"` may follow the load."""
    cpus: Callable[[], float] | None = None
    """Returns the number of CPUs that the workers may use; None for those of this machine."""
    accepts: frozenset[str] = frozenset()
    """Arguments of the loader that other kinds refuse: "worker_init_fn", "multiprocessing_context"."""
    prepare: Callable[[], object] | None = None
    """Starts resources of later pools in the background. Called when a loader is created that has workers and no
    multiprocessing context.
    """
