"""Worker threads, for thread-safe datasets and work that releases the GIL."""

from __future__ import annotations

import logging
import os
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

from feedline.core import finalizers, telemetry
from feedline.core.batch import BatchResult
from feedline.core.rng_globals import SAMPLER_STEPS
from feedline.core.tensors import Allocator, allocate_tensor
from feedline.core.threads import WAKE_S, CancelScope
from feedline.errors import WorkerError, WorkerStalledError
from feedline.workers.base import Builder, PoolStatistics
from feedline.workers.wait_samples import ThreadSamples

_log = logging.getLogger("feedline")


class ThreadFuture:
    """Future of a queued request; locked until its result is ready."""

    __slots__ = ("_cancelled", "_error", "_gate", "_pool", "_result", "request")

    def __init__(self, pool: ThreadPool, request: Any) -> None:
        self._pool = weakref.proxy(pool)  # a future that is kept must not keep the threads alive
        self.request = request
        self._gate = threading.Lock()
        self._gate.acquire()
        self._result: BatchResult | None = None
        self._error: BaseException | None = None
        self._cancelled = False

    def run(self, builder: Builder, allocate: Allocator) -> None:
        """Build on the calling thread, then release the lock."""
        try:
            if not self._cancelled:
                self._result = builder(self.request, allocate)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the training loop
            self._error = error
        finally:
            self._gate.release()

    def done(self) -> bool:
        """True once the lock is released, or the request canceled."""
        return self._cancelled or not self._gate.locked()

    def result(self) -> BatchResult:
        """Wait for the lock; see `BatchFuture`."""
        if not self.done():
            self._pool._wait(self)
        self._pool._samples.begin_step()
        error, self._error = self._error, None
        if error is not None:
            raise error  # not kept: the traceback that it gets refers to this future
        built = self._result
        if built is None or self._cancelled:  # its thread may have been building it
            raise WorkerError(f"{self.request} was canceled, or its error was raised before")
        return built

    def cancel(self) -> None:
        """Skip the request, or drop its result."""
        self._cancelled = True
        self._result = self._error = None

    def abandon(self) -> None:
        """Cancel a request that no thread takes; ends waits for it."""
        self.cancel()
        self._gate.release()


class ThreadPool:
    """Threads that share one builder; idle ones take the next request.

    `allocate` allocates batches and must be thread-safe. With `round_robin`, partition p belongs to thread
    p modulo `num_workers`, which keeps it in order. `timeout_s` (0: no limit) bounds one wait for a batch. After
    `stall_s` seconds, the stacks of all threads are logged once.
    """

    def __init__(
        self,
        builder: Builder,
        num_workers: int,
        *,
        allocate: Allocator = allocate_tensor,
        round_robin: bool = False,
        timeout_s: float = 0,
        stall_s: float = 60,
    ) -> None:
        self._builder, self._allocate = builder, allocate
        self._timeout_s, self._stall_s = timeout_s, stall_s
        self._owner = os.getpid()
        self._queues: list[SimpleQueue[ThreadFuture | None]] = [SimpleQueue()]
        self._round_robin = round_robin
        self._num_workers = 0
        self._threads: list[threading.Thread] = []
        self._open: set[ThreadFuture] = set()
        self._building: set[int] = set()
        self._samples = ThreadSamples(self._building)
        self._finished = threading.Event()
        self._scope = CancelScope()
        self._finalizer = weakref.finalize(self, finalizers.run, _stop, self._threads, self._queues, self._scope)
        self.resize(num_workers)

    def submit(self, request: Any) -> ThreadFuture:
        """Queue a request for an idle thread, or for its partition's thread."""
        self._check()
        future = ThreadFuture(self, request)
        partition = request.partition if self._round_robin else 0
        self._open.add(future)
        self._queues[partition % len(self._queues)].put(future)
        return future

    def wait_any(self, futures: Iterable[ThreadFuture]) -> ThreadFuture:
        """See `WorkerPool`; raises `WorkerStalledError` after `timeout_s`."""
        futures = list(futures)
        done: list[ThreadFuture] = []

        def wait(limit_s: float) -> bool:
            # Cleared before the look: a batch that is done after it sets the event again.
            self._finished.clear()
            done.extend(future for future in futures if future.done())
            if not done:
                self._finished.wait(limit_s)
                done.extend(future for future in futures if future.done())
            return bool(done)

        self._wait_until(wait, "any batch")
        return done[0]

    def resize(self, num_workers: int) -> None:
        """Start threads, or end surplus ones after their current request."""
        for _ in range(self._num_workers - num_workers):
            self._queues[-1].put(None)
            if self._round_robin:
                self._queues.pop()
        for number in range(self._num_workers, num_workers):
            self._start(number)
        self._num_workers = num_workers
        self._threads[:] = [thread for thread in self._threads if thread.is_alive()]

    @property
    def processes(self) -> list[Any]:
        """Always empty."""
        return []

    def statistics(self) -> PoolStatistics:
        """Numbers of live threads and of requests, queued or being built."""
        alive = sum(thread.is_alive() for thread in self._threads)
        return PoolStatistics(
            workers=alive,
            in_flight=sum(not future.done() for future in self._open.copy()),  # copied in one step: threads change it
            contended_share=self._samples.contended_share,
            outside_share=self._samples.outside_share,
            step_outside_share=self._samples.step_outside_share,
        )

    def close(self) -> None:
        """Cancel queued requests and reads from stores; end and join every thread."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, number: int) -> None:
        if self._round_robin and number > 0:
            self._queues.append(SimpleQueue())
        shared = (self._finished, self._scope, self._open, self._building, self._samples)
        arguments = (self._queues[-1], *shared, self._builder, self._allocate, number)
        thread = threading.Thread(target=_run_worker, args=arguments, name=f"feedline-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _check(self) -> None:
        if not self._finalizer.alive:
            raise WorkerError("the worker threads of this iterator have been closed")
        if os.getpid() != self._owner:
            raise WorkerError(
                f"these worker threads belong to process {self._owner}, not to {os.getpid()}, which was forked from it:"
                " call iter(loader) again there"
            )

    def _wait(self, future: ThreadFuture) -> None:
        def wait(limit_s: float) -> bool:
            opened = future._gate.acquire(timeout=limit_s)
            if opened:
                future._gate.release()
            return opened

        self._wait_until(wait, str(future.request))

    def _wait_until(self, wait: Callable[[float], bool], what: str) -> None:
        """Call `wait(limit_s)` until it returns True; log a stall once.

        Raises `WorkerStalledError` after `timeout_s`, and `WorkerError` if the pool is closed in the meantime.
        """
        started, has_logged = monotonic(), False
        self._samples.end_step()
        sample_s = self._samples.next_s()
        while True:
            waited = monotonic() - started
            limits = [limit for limit in (self._timeout_s, 0 if has_logged else self._stall_s) if limit]
            left_s = min(min(limits, default=inf), sample_s - started) - waited
            opened = wait(min(max(left_s, 0), WAKE_S))
            waited = monotonic() - started
            if opened:
                self._samples.add_wait(waited)
                return
            if started + waited >= sample_s:
                self._samples.take()
                sample_s = self._samples.next_s()
            self._check()  # an interrupt within `submit` may have closed it: no thread takes the request then
            if self._timeout_s and waited >= self._timeout_s:
                limit = f"DataLoader timed out after {self._timeout_s} seconds"
                raise WorkerStalledError(f"{limit} waiting for {what}.\n{self._stacks()}")
            if not has_logged and waited >= self._stall_s:
                has_logged = True
                _log.warning("waiting for %s since %.0f s.\n%s", what, waited, self._stacks())

    def _stacks(self) -> str:
        frames = sys._current_frames()
        parts = []
        for thread in self._threads:
            if thread.ident in frames:
                stack = "".join(traceback.format_stack(frames[thread.ident]))
                parts.append(f"Stack of worker thread {thread.name}:\n{stack}")
        return "\n".join(parts)


def _run_worker(
    queue: SimpleQueue[ThreadFuture | None],
    finished: threading.Event,
    scope: CancelScope,
    unanswered: set[ThreadFuture],
    building: set[int],
    samples: ThreadSamples,
    builder: Builder,
    allocate: Allocator,
    number: int,
) -> None:
    telemetry.set_worker(number)
    thread = threading.get_native_id()
    with scope.enter():
        while (future := queue.get()) is not None:
            building.add(thread)
            future.run(builder, allocate)
            samples.take_of_step()
            building.discard(thread)
            unanswered.discard(future)
            finished.set()
            del future  # frees a dropped result now, not when the next request arrives


# A finalizer, so it must not refer to the pool.
def _stop(threads: list[threading.Thread], queues: list[SimpleQueue[ThreadFuture | None]], scope: CancelScope) -> None:
    for queue in queues:
        with suppress(QueueEmpty):
            while True:
                future = queue.get_nowait()
                if future is not None:
                    future.abandon()
        for _ in threads:
            queue.put(None)
    scope.cancel()
    for thread in threads:
        if thread is not threading.current_thread():
            with suppress(RuntimeError):  # an interrupt came before its start
                thread.join()
    threads.clear()


class GlobalRngCheck:
    """Builder that warns if its first batch draws from global random generators.

    Threads share these generators, so such draws cannot be repeated.
    """

    def __init__(self, builder: Builder, dataset: object) -> None:
        self._builder, self._dataset = builder, dataset
        self._first = threading.Lock()

    def __call__(self, request: Any, allocate: Allocator) -> BatchResult:
        """Build the batch; only the first call is checked."""
        # Later calls run at the same time as others: a changed state could not be attributed to one of them.
        if not self._first.acquire(blocking=False):
            return self._builder(request, allocate)
        sampled, before = SAMPLER_STEPS.draws, _rng_states()
        result = self._builder(request, allocate)
        drawn = [name for name, state in _rng_states().items() if state != before[name]]
        # A sampler of the user draws in the training thread, maybe at the same time: that is not a draw of the dataset.
        if drawn and not SAMPLER_STEPS.running and SAMPLER_STEPS.draws == sampled:
            warnings.warn(
                f"{type(self._dataset).__name__} draws from {' and '.join(drawn)}, which all worker threads share: "
                "its random numbers are not fixed by seed=. Draw from feedline.sample_rng(), or use "
                "worker_method='process'.",
                stacklevel=2,
            )
        return result


def _rng_states() -> dict[str, object]:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002 - it is the legacy generator that such transforms use
    return {
        "random": random.getstate(),
        "numpy.random": (numpy_state[1].tobytes(), *numpy_state[2:]),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
