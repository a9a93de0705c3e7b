"""Waits that end when nobody wants them any more, and threads that no exit waits for.

Work done by several threads at once, its results in order, no more of it ahead than fits into memory.

Work done on several threads, its results taken in order.
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
"""No wait is longer in one piece: a Ctrl-C between Python's last look for signals and the wait would wait as long."""


_IDLE_S = 5.0
"""A thread of a pool that had nothing to do for so long ends."""


IO_THREADS = 32
"""Threads of a pool that mostly waits for stores: enough to hide their latency, few enough for memory and sockets."""


class WaitCancelledError(FeedlineError, CancelledError):
    """Whoever wanted what was being waited for is gone: interrupted, closed, or served otherwise."""


class _ThreadLocalScope(threading.local):
    """What is so in the calling thread."""

    scope: CancelScope | None = None
    pooled = False


_here = _ThreadLocalScope()


class CancelScope:
    """Waits of one or several threads that are given up together, and with the scope in which this one was made.

        with CancelScope():
            pool.submit(read).result()  # whatever ends the block, nothing of it goes on waiting

    A scope can also be made in one thread, `entered` by others, and cancelled by any.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.RLock()  # reentrant, because a finalizer may cancel
        self._calls: set[Callable[[], object]] = set()
        self._outer = self._before = _here.scope
        if self._outer is not None:
            self._outer.add(self.cancel)

    def cancel(self) -> None:
        """End every wait of the scope, those that have not begun too, each with a WaitCancelledError."""
        with self._lock:
            self.cancelled, calls, self._calls = True, self._calls, set()
        for call in calls:
            call()
        if self._outer is not None:
            self._outer.discard(self.cancel)

    def add(self, call: Callable[[], object]) -> None:
        """Have this called when the scope is cancelled: now, if it is already."""
        with self._lock:
            if not self.cancelled:
                self._calls.add(call)
                return
        call()

    def discard(self, call: Callable[[], object]) -> None:
        """Do not call this any more."""
        with self._lock:
            self._calls.discard(call)

    def sleep(self, seconds: float) -> None:
        """Wait so long; WaitCancelledError as soon as the scope is cancelled."""
        gate = threading.Lock()
        gate.acquire()
        self.add(gate.release)
        try:
            if gate.acquire(timeout=seconds):
                raise WaitCancelledError("nobody waits for it any more")
        finally:
            self.discard(gate.release)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A block in which the waits of this thread belong to the scope."""
        before, _here.scope = _here.scope, self
        try:
            yield
        finally:
            _here.scope = before

    def __enter__(self) -> Self:
        self._before, _here.scope = _here.scope, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.scope = self._before
        self.cancel()


def check() -> None:
    """WaitCancelledError if the scope of this thread is cancelled."""
    if _here.scope is not None and _here.scope.cancelled:
        raise WaitCancelledError("nobody waits for it any more")


def sleep(seconds: float) -> None:
    """Wait so long; WaitCancelledError as soon as the scope of this thread, if it has one, is cancelled."""
    if _here.scope is None:
        sleep_through(seconds)
    else:
        _here.scope.sleep(seconds)


def wait(event: threading.Event, timeout_s: float) -> None:
    """Return once it is set, or after so long; WaitCancelledError as soon as the scope of this thread is cancelled.

    The event is set then, too: it must be of this wait alone.
    """
    scope = _here.scope or CancelScope()
    scope.add(event.set)
    try:
        event.wait(timeout_s)
    finally:
        scope.discard(event.set)
    if scope.cancelled:
        raise WaitCancelledError("nobody waits for it any more")


class DaemonPool(Executor):
    """As ThreadPoolExecutor, for calls that may hang: neither the exit of Python nor a failure waits for its threads.

    A call belongs to the scope of the thread that submits it: once that is cancelled, its future is done, even if the
    call itself does not return. As a block, the pool has a scope of its own, which ends with the block; a block that
    ends well waits for its calls. Threads begin on demand and end when idle.
    """

    def __init__(self, max_workers: int = IO_THREADS, thread_name_prefix: str = "feedline") -> None:
        self._crew = _PoolThreads(max_workers, thread_name_prefix)
        self._scope: CancelScope | None = None
        weakref.finalize(self, self._crew.end).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call it in one of the threads."""
        task = _PoolTask(_InterruptibleFuture(), partial(fn, *args, **kwargs), self._scope or _here.scope)
        self._crew.put(task)
        task.watch()
        return task.future

    def call(self, fn: Callable[[], T]) -> T:
        """What it gives. Ctrl-C and `CancelScope.cancel` end the wait for it, whatever it does."""
        if _here.pooled:  # somebody else waits, and can be told
            return fn()
        with CancelScope():
            return self.submit(fn).result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; with `wait`, return when all are done."""
        self._crew.end(drop=cancel_futures)
        if wait:
            self._crew.join()

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
    """A future for whose result the main thread can be interrupted at any moment."""

    def result(self, timeout: float | None = None) -> Any:
        while timeout is None and not self.done():
            with suppress(TimeoutError, CancelledError):
                self.exception(WAKE_S)
        return super().result(timeout)


class _PoolTask(NamedTuple):
    future: Future[Any]
    call: Callable[[], Any]
    scope: CancelScope | None

    def watch(self) -> None:
        if self.scope is not None:
            self.scope.add(self.give_up)
            if self.future.done():  # before it could be watched
                self.scope.discard(self.give_up)

    def give_up(self) -> None:
        if not self.future.cancel():
            with suppress(InvalidStateError):
                self.future.set_exception(WaitCancelledError("nobody waits for it any more"))

    def run(self) -> Callable[[], None]:
        """Call it; gives what then lets the future know."""
        if not self.future.set_running_or_notify_cancel():
            return _nothing
        before, _here.scope = _here.scope, self.scope
        try:
            settle = partial(self.future.set_result, self.call())
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks the future
            settle = partial(self.future.set_exception, error)
        finally:
            _here.scope = before
        return partial(self._settle, settle)

    def _settle(self, settle: Callable[[], None]) -> None:
        with suppress(InvalidStateError):  # given up meanwhile
            settle()
        if self.scope is not None:
            self.scope.discard(self.give_up)


def _nothing() -> None:
    pass


class _PoolThreads:
    """The threads of a pool, which know nothing of it, so that it can be dropped."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._numbers = most, name, count()
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[_PoolTask | None] = SimpleQueue()
        self._undone = 0
        self._threads: set[threading.Thread] = set()
        self._ended = False

    def put(self, task: _PoolTask) -> None:
        with self._lock:
            if self._ended:
                raise RuntimeError("a pool that was shut down takes no calls")
            if len(self._threads) < min(self._undone + 1, self._most):
                self._start()
            self._undone += 1
            self._tasks.put(task)

    def end(self, *, drop: bool = False) -> None:
        # Without the lock, which a finalizer might interrupt.
        self._ended = True
        with suppress(Empty):
            while drop:
                if (task := self._tasks.get_nowait()) is not None:
                    task.future.cancel()
        for _ in range(self._most):
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
        _here.pooled = True
        while (task := self._next()) is not None:
            settle = task.run()
            with self._lock:
                self._undone -= 1
            settle()
            del task, settle  # what they hold is freed now, not with the next call

    def _next(self) -> _PoolTask | None:
        """The next call; None, once the thread is no longer counted on, when there is none."""
        while True:
            with suppress(Empty):
                task = self._tasks.get(timeout=_IDLE_S)
                if task is not None:
                    return task
                with self._lock:
                    self._threads.discard(threading.current_thread())
                return None
            with self._lock:
                if self._undone < len(self._threads):
                    self._threads.discard(threading.current_thread())
                    return None


class BoundedMap:
    """Threads of this process, made on first use; they end when this is dropped. Pickles without them."""

    def __init__(self) -> None:
        self._pool = PerProcess(partial(DaemonPool, IO_THREADS, "feedline-dataset"))

    def map(
        self, work: Callable[[int], T], numbers: Iterable[int], nbytes: Callable[[int], int], limit_nbytes: int
    ) -> Iterator[T]:
        """`work` of each number, in order; what is begun ahead of the result that is asked for fits into the limit.

        `nbytes` is what a result takes. The first failure is raised, and what has not begun is left undone.
        """
        begun: deque[tuple[Future[T], int]] = deque()
        ahead = 0
        try:
            for number in numbers:
                size = nbytes(number)
                while begun and (ahead + size > limit_nbytes or len(begun) >= IO_THREADS):
                    future, released = begun.popleft()
                    ahead -= released
                    yield future.result()
                begun.append((self._pool().submit(work, number), size))
                ahead += size
            while begun:
                yield begun.popleft()[0].result()
        finally:
            for future, _ in begun:
                future.cancel()


R = TypeVar("R")


class WorkAhead(Generic[T, R]):
    """`work(item)` for each item, a bounded number of items ahead; a block that joins its threads when it is left."""

    def __init__(self, work: Callable[[T], R], items: Iterable[T], threads: int) -> None:
        self._work, self._items = work, iter(items)
        self._pool = ThreadPoolExecutor(threads, "feedline-pack")
        self._window = deque[Future[R]]()
        self._submit(3 * threads)

    def __iter__(self) -> Iterator[R]:
        """The results that are left, each taken off when the next is asked for."""
        while self._window:
            yield self.head()
            self.advance()

    def __bool__(self) -> bool:
        return bool(self._window)

    def head(self) -> R:
        """The result of the first item that has not been taken off; what `work` raised is raised."""
        return self._window[0].result()

    def advance(self) -> None:
        """Take the first off."""
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
