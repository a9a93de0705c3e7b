"""Cancellable waits, daemon thread pools, and ordered maps over threads.

A `CancelScope` ends waits whose result is no longer needed. `DaemonPool` runs calls that may hang. `BoundedMap` and
`WorkAhead` return results in order, with a bounded amount of work ahead.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, islice
from queue import Empty, SimpleQueue
from time import sleep as sleep_through
from types import TracebackType
from typing import Any, Generic, NamedTuple, ParamSpec, Self, TypeVar

from feedline.core.caches import PerProcess
from feedline.errors import FeedlineError

T = TypeVar("T")


P = ParamSpec("P")


WAKE_S = 1.0
"""Longest single wait, in seconds.

A Ctrl-C that arrives between Python's last check for signals and the wait is only noticed after it.
"""


_IDLE_S = 5.0
"""Seconds after which an idle pool thread ends."""


IO_THREADS = 32
"""Threads of a pool that mostly waits for stores: enough to hide their latency, few enough for memory and sockets."""


INDEX_THREADS = 8
"""Threads that index files: each holds a few parts of its file in memory."""


class WaitCancelledError(FeedlineError, CancelledError):
    """The wait was canceled: interrupted, closed, or no longer needed."""


class _ThreadLocalScope(threading.local):
    """The scope of the calling thread; `pooled` in threads of a `DaemonPool`."""

    scope: CancelScope | None = None
    pooled = False


_current = _ThreadLocalScope()


class CancelScope:
    """A group of waits, in any threads, that are canceled together.

        with CancelScope():
            pool.submit(read).result()  # leaving the block cancels every wait in it

    A scope is canceled with the scope in which it was created. It can also be created in one thread, `enter` by
    others, and canceled by any.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.RLock()  # reentrant, because a finalizer may cancel
        self._calls: set[Callable[[], object]] = set()
        self._outer = self._before = _current.scope
        if self._outer is not None:
            self._outer.add(self.cancel)

    def cancel(self) -> None:
        """End every wait of the scope, present and future, with `WaitCancelledError`."""
        with self._lock:
            self.cancelled, calls, self._calls = True, self._calls, set()
        # Outside of the lock: a call may take other locks, whose holders may be waiting for this lock.
        for call in calls:
            call()
        if self._outer is not None:
            self._outer.discard(self.cancel)

    def add(self, call: Callable[[], object]) -> None:
        """Register a callback for the cancellation; called now if already canceled."""
        with self._lock:
            if not self.cancelled:
                self._calls.add(call)
                return
        call()

    def discard(self, call: Callable[[], object]) -> None:
        """Remove a callback."""
        with self._lock:
            self._calls.discard(call)

    def sleep(self, seconds: float) -> None:
        """Sleep; WaitCancelledError as soon as the scope is canceled."""
        # A lock serves as the timer: any thread may release it, and Ctrl-C interrupts the wait for it.
        gate = threading.Lock()
        gate.acquire()
        self.add(gate.release)
        try:
            if gate.acquire(timeout=seconds):
                raise WaitCancelledError("the wait was canceled: its result is no longer needed")
        finally:
            self.discard(gate.release)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Within the block, the waits of this thread belong to the scope."""
        before, _current.scope = _current.scope, self
        try:
            yield
        finally:
            _current.scope = before

    def __enter__(self) -> Self:
        self._before, _current.scope = _current.scope, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.scope = self._before
        self.cancel()


def check_not_cancelled() -> None:
    """Raise `WaitCancelledError` if the scope of this thread is canceled."""
    if _current.scope is not None and _current.scope.cancelled:
        raise WaitCancelledError("the wait was canceled: its result is no longer needed")


def sleep(seconds: float) -> None:
    """Sleep; WaitCancelledError as soon as the scope of this thread is canceled.

    A thread without a scope cannot be interrupted.
    """
    if _current.scope is None:
        sleep_through(seconds)
    else:
        _current.scope.sleep(seconds)


def wait(event: threading.Event, timeout_s: float) -> None:
    """Wait for the event, at most `timeout_s` seconds.

    WaitCancelledError as soon as the scope of this thread is canceled. Cancellation sets the event: no other wait may
    use it.
    """
    scope = _current.scope or CancelScope()
    scope.add(event.set)
    try:
        event.wait(timeout_s)
    finally:
        scope.discard(event.set)
    if scope.cancelled:
        raise WaitCancelledError("the wait was canceled: its result is no longer needed")


class DaemonPool(Executor):
    """A `ThreadPoolExecutor` for calls that may hang.

    Neither the exit of Python nor an exception waits for its threads. A call belongs to the scope of the thread that
    submits it: once that is canceled, the future is done, even if the call does not return. As a context manager the
    pool has a scope of its own, which ends with the block; a block that ends without an exception waits for its calls.
    Threads start on demand and end when idle.

    Each layer has its own pools: calls in the pool of a dataset wait for those of a file set, which wait for those of a
    cache and of a store. In a single pool, waiting calls could occupy all threads, and those that they wait for would
    never run.
    """

    def __init__(self, max_workers: int = IO_THREADS, thread_name_prefix: str = "feedline") -> None:
        self._workers = _PoolThreads(max_workers, thread_name_prefix)
        self._scope: CancelScope | None = None
        # Not at exit: daemon threads end with the interpreter, and a hanging call must not delay it.
        weakref.finalize(self, self._workers.end).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        task = _PoolTask(_InterruptibleFuture(), partial(fn, *args, **kwargs), self._scope or _current.scope)
        self._workers.put(task)
        task.watch()
        return task.future

    def call(self, fn: Callable[[], T]) -> T:
        """The result of `fn`, called in a pool thread.

        Ctrl-C and `CancelScope.cancel` end the wait for it in every case.
        """
        if _current.pooled:  # the thread that waits for this one can be interrupted already
            return fn()
        with CancelScope():
            return self.submit(fn).result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; with `wait`, return when all are done."""
        self._workers.end(drop=cancel_futures)
        if wait:
            self._workers.join()

    def __enter__(self) -> Self:
        self._scope = CancelScope()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._scope is not None
        try:
            self.shutdown(wait=kind is None, cancel_futures=kind is not None)
        finally:
            self._scope.cancel()


class _InterruptibleFuture(Future[Any]):
    """A future whose `result()` can be interrupted in the main thread."""

    def result(self, timeout: float | None = None) -> Any:
        while timeout is None and not self.done():
            with suppress(TimeoutError, CancelledError):
                self.exception(WAKE_S)
        return super().result(timeout)


class _PoolTask(NamedTuple):
    """A call in the queue of a pool, canceled with its scope."""

    future: Future[Any]
    call: Callable[[], Any]
    scope: CancelScope | None

    def watch(self) -> None:
        if self.scope is not None:
            self.scope.add(self.cancel)
            if self.future.done():  # before it was added to the scope
                self.scope.discard(self.cancel)

    def cancel(self) -> None:
        if not self.future.cancel():
            with suppress(InvalidStateError):
                self.future.set_exception(WaitCancelledError("the wait was canceled: its result is no longer needed"))

    def run(self) -> Callable[[], None]:
        """Call the function; returns a callback that resolves the future."""
        if not self.future.set_running_or_notify_cancel():
            return _do_nothing
        before, _current.scope = _current.scope, self.scope
        try:
            settle = partial(self.future.set_result, self.call())
        except BaseException as error:  # noqa: BLE001 - raised by `future.result()`
            settle = partial(self.future.set_exception, error)
        finally:
            _current.scope = before
        return partial(self._settle, settle)

    def _settle(self, settle: Callable[[], None]) -> None:
        with suppress(InvalidStateError):  # canceled in between
            settle()
        if self.scope is not None:
            self.scope.discard(self.cancel)


def _do_nothing() -> None:
    pass


class _PoolThreads:
    """The threads of a pool.

    They hold no reference to the pool, so that it can be garbage-collected.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name, self._numbers = limit, name, count()
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[_PoolTask | None] = SimpleQueue()
        self._undone = 0
        self._threads: set[threading.Thread] = set()
        self._ended = False

    def put(self, task: _PoolTask) -> None:
        with self._lock:
            if self._ended:
                raise RuntimeError("this pool was shut down and takes no more calls")
            if len(self._threads) < min(self._undone + 1, self._limit):
                self._start()
            self._undone += 1
            self._tasks.put(task)

    def end(self, *, drop: bool = False) -> None:
        # Without the lock: a finalizer may run in the thread that holds it.
        self._ended = True
        with suppress(Empty):
            while drop:
                if (task := self._tasks.get_nowait()) is not None:
                    task.future.cancel()
        for _ in range(self._limit):
            self._tasks.put(None)

    def join(self) -> None:
        for thread in list(self._threads):
            thread.join()

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}_{next(self._numbers)}", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # too many threads, or Python is about to exit
            self._threads.discard(thread)
            if not self._threads:
                raise

    def _serve(self) -> None:
        _current.pooled = True
        while (task := self._next()) is not None:
            settle = task.run()
            # Counted before the future is done: its waiter may submit the next call at once, and this thread is
            # free.
            with self._lock:
                self._undone -= 1
            settle()
            del task, settle  # frees the objects of the task now, not with the next task

    def _next(self) -> _PoolTask | None:
        """The next task; None if the thread is to end."""
        while True:
            with suppress(Empty):
                task = self._tasks.get(timeout=_IDLE_S)
                if task is not None:
                    return task
                with self._lock:
                    self._threads.discard(threading.current_thread())
                return None
            # A call may have been queued since the wait ended: then all threads are needed, and this one stays.
            with self._lock:
                if self._undone < len(self._threads):
                    self._threads.discard(threading.current_thread())
                    return None


class BoundedMap:
    """An ordered map over the threads of this process, bounded in bytes.

    Threads start on first use and end when the map is dropped. Pickles without them.
    """

    def __init__(self) -> None:
        self._pool = PerProcess(partial(DaemonPool, IO_THREADS, "feedline-dataset"))

    def map(
        self, work: Callable[[int], T], numbers: Iterable[int], nbytes: Callable[[int], int], limit_nbytes: int
    ) -> Iterator[T]:
        """`work(number)` for each number, in order.

        `nbytes(number)` is the size of a result. Work is started ahead as long as it fits into `limit_nbytes`. The
        first exception is raised, and work that was not started is dropped.
        """
        started: deque[tuple[Future[T], int]] = deque()
        ahead = 0
        try:
            for number in numbers:
                size = nbytes(number)
                while started and (ahead + size > limit_nbytes or len(started) >= IO_THREADS):
                    future, released = started.popleft()
                    ahead -= released
                    yield future.result()
                started.append((self._pool().submit(work, number), size))
                ahead += size
            while started:
                yield started.popleft()[0].result()
        finally:
            for future, _ in started:
                future.cancel()


R = TypeVar("R")


class WorkAhead(Generic[T, R]):
    """`work(item)` for each item, in order, a bounded number of items ahead.

    A context manager: leaving it joins its threads.
    """

    def __init__(self, work: Callable[[T], R], items: Iterable[T], threads: int) -> None:
        self._work, self._items = work, iter(items)
        self._pool = ThreadPoolExecutor(threads, "feedline-pack")
        self._window = deque[Future[R]]()
        self._submit(3 * threads)

    def __iter__(self) -> Iterator[R]:
        """The remaining results; each is removed when the next one is requested."""
        while self._window:
            yield self.head()
            self.advance()

    def __bool__(self) -> bool:
        return bool(self._window)

    def head(self) -> R:
        """The first remaining result, or the exception of its `work`."""
        return self._window[0].result()

    def advance(self) -> None:
        """Remove the first item."""
        self._window.popleft()
        self._submit(1)

    def _submit(self, number: int) -> None:
        self._window.extend(self._pool.submit(self._work, item) for item in islice(self._items, number))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
