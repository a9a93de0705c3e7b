"""Worker threads: for datasets that several threads may read at once, and for work that releases the GIL.

Notices transforms that draw from generators which all threads share: with threads, no seed makes them repeatable.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from queue import Empty as QueueEmpty
from queue import SimpleQueue
from time import monotonic
from typing import Any, Self

import numpy as np
import torch

from feedline.core import telemetry
from feedline.core.batch import BatchResult
from feedline.core.tensors import Allocator, allocate_tensor
from feedline.core.threads import WAKE_S, CancelScope
from feedline.errors import WorkerStalledError
from feedline.workers.base import Builder, PoolStatistics

_log = logging.getLogger("feedline")


class ThreadFuture:
    """A request on its way through the threads; its lock is held until the result is there."""

    __slots__ = ("_built", "_cancelled", "_error", "_gate", "_pool", "request")

    def __init__(self, pool: ThreadPool, request: Any) -> None:
        self._pool = weakref.proxy(pool)
        self.request = request
        self._gate = threading.Lock()
        self._gate.acquire()
        self._built: BatchResult | None = None
        self._error: BaseException | None = None
        self._cancelled = False

    def run(self, builder: Builder, empty: Allocator) -> None:
        """Build on the calling thread, and open the gate."""
        try:
            if not self._cancelled:
                self._built = builder(self.request, empty)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the training loop
            self._error = error
        finally:
            self._gate.release()

    def done(self) -> bool:
        """Whether the gate is open."""
        return not self._gate.locked()

    def result(self) -> BatchResult:
        """Wait for the gate; see `Ticket`."""
        if self._gate.locked():
            self._pool._wait(self)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        built, self._built = self._built, None
        assert built is not None
        return built

    def cancel(self) -> None:
        """The request is skipped if no thread has begun it; a result is dropped."""
        self._cancelled = True
        self._built = self._error = None


class ThreadPool:
    """`num_workers` threads over one builder and one queue; the first idle thread takes the next request.

    Batches lie in memory from `empty`, which several threads call. With `pinned` every partition has its own
    thread (partition modulo `num_workers`), so that it is drawn in order.
    `timeout_s` (0: none) bounds one wait for a batch; after `stall_s` the stacks of all threads are logged once.
    """

    def __init__(
        self,
        builder: Builder,
        num_workers: int,
        *,
        empty: Allocator = allocate_tensor,
        pinned: bool = False,
        timeout_s: float = 0,
        stall_s: float = 60,
    ) -> None:
        self._builder, self._empty = builder, empty
        self._timeout_s, self._stall_s = timeout_s, stall_s
        self._queues: list[SimpleQueue[ThreadFuture | None]] = [SimpleQueue()]
        self._pinned = pinned
        self._wanted = 0
        self._threads: list[threading.Thread] = []
        self._finished = threading.Event()
        self._scope = CancelScope()
        self._finalizer = weakref.finalize(self, _stop, self._threads, self._queues, self._scope)
        self.resize(num_workers)

    def submit(self, request: Any) -> ThreadFuture:
        """Queue the request for the first idle thread, or for its partition's."""
        ticket = ThreadFuture(self, request)
        partition = request.partition if self._pinned else 0
        self._queues[partition % len(self._queues)].put(ticket)
        return ticket

    def wait_any(self, tickets: Iterable[ThreadFuture]) -> ThreadFuture:
        """The first of these tickets that is done."""
        tickets = list(tickets)
        done: list[ThreadFuture] = []

        def wait(limit_s: float) -> bool:
            self._finished.clear()
            done.extend(ticket for ticket in tickets if ticket.done())
            if not done:
                self._finished.wait(limit_s)
                done.extend(ticket for ticket in tickets if ticket.done())
            return bool(done)

        self._patiently(wait, "any batch")
        return done[0]

    def resize(self, num_workers: int) -> None:
        """Start threads, or let the surplus end after the request that each has in hand."""
        for _ in range(self._wanted - num_workers):
            self._queues[-1].put(None)
            if self._pinned:
                self._queues.pop()
        for number in range(self._wanted, num_workers):
            self._start(number)
        self._wanted = num_workers
        self._threads[:] = [thread for thread in self._threads if thread.is_alive()]

    @property
    def processes(self) -> list[Any]:
        """None."""
        return []

    def statistics(self) -> PoolStatistics:
        """Threads alive, and requests queued."""
        alive = sum(thread.is_alive() for thread in self._threads)
        return PoolStatistics(workers=alive, in_flight=sum(queue.qsize() for queue in self._queues))

    def close(self) -> None:
        """End every thread and join it; what one waits for from a store is given up."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, number: int) -> None:
        if self._pinned and number > 0:
            self._queues.append(SimpleQueue())
        arguments = (self._queues[-1], self._finished, self._scope, self._builder, self._empty, number)
        thread = threading.Thread(target=_serve, args=arguments, name=f"feedline-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait(self, ticket: ThreadFuture) -> None:
        def wait(limit_s: float) -> bool:
            opened = ticket._gate.acquire(timeout=limit_s)
            if opened:
                ticket._gate.release()
            return opened

        self._patiently(wait, str(ticket.request))

    def _patiently(self, wait: Callable[[float], bool], what: str) -> None:
        """Call `wait(limit_s)` until it says that it has waited enough, within `timeout_s`; log a stall once."""
        started, told = monotonic(), False
        while True:
            waited = monotonic() - started
            limits = [limit for limit in (self._timeout_s, 0 if told else self._stall_s) if limit]
            if wait(min(max(min(limits, default=inf) - waited, 0), WAKE_S)):
                return
            waited = monotonic() - started
            if self._timeout_s and waited >= self._timeout_s:
                limit = f"DataLoader timed out after {self._timeout_s} seconds"
                raise WorkerStalledError(f"{limit} waiting for {what}.\n{self._stacks()}")
            if not told and waited >= self._stall_s:
                told = True
                _log.warning("waiting for %s since %.0f s.\n%s", what, waited, self._stacks())

    def _stacks(self) -> str:
        frames = sys._current_frames()
        parts = []
        for thread in self._threads:
            if thread.ident in frames:
                stack = "".join(traceback.format_stack(frames[thread.ident]))
                parts.append(f"Stack of worker thread {thread.name}:\n{stack}")
        return "\n".join(parts)


def _serve(
    queue: SimpleQueue[ThreadFuture | None],
    finished: threading.Event,
    scope: CancelScope,
    builder: Builder,
    empty: Allocator,
    number: int,
) -> None:
    telemetry.work_as(number)
    with scope.entered():
        while (ticket := queue.get()) is not None:
            ticket.run(builder, empty)
            finished.set()
            del ticket  # a result that nobody holds any more is freed now, not with the next request


def _stop(threads: list[threading.Thread], queues: list[SimpleQueue[ThreadFuture | None]], scope: CancelScope) -> None:
    for queue in queues:
        with suppress(QueueEmpty):
            while True:
                ticket = queue.get_nowait()
                if ticket is not None:
                    ticket.cancel()
        for _ in threads:
            queue.put(None)
    scope.cancel()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    threads.clear()


class GlobalRngCheck:
    """The builder, whose first batch is watched for draws from `random`, `numpy.random` and torch; warns once."""

    def __init__(self, builder: Builder, dataset: object) -> None:
        self._builder, self._dataset = builder, dataset
        self._first = threading.Lock()

    def __call__(self, request: Any, empty: Allocator) -> BatchResult:
        """As the builder. Only the very first call is watched: others run beside it."""
        if not self._first.acquire(blocking=False):
            return self._builder(request, empty)
        before = _states()
        built = self._builder(request, empty)
        drawn = [name for name, state in _states().items() if state != before[name]]
        if drawn:
            warnings.warn(
                f"{type(self._dataset).__name__} draws from {' and '.join(drawn)}, which all worker threads share: "
                "its random numbers are not fixed by seed=. Draw from feedline.sample_rng(), or use "
                "worker_method='process'.",
                stacklevel=2,
            )
        return built


def _states() -> dict[str, object]:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002 - it is the legacy generator that such transforms use
    return {
        "random": random.getstate(),
        "numpy.random": (numpy_state[1].tobytes(), *numpy_state[2:]),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
