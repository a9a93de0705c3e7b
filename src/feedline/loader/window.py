"""Requests in flight, and their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from feedline.core.batch import BatchResult
from feedline.core.cursor import Cursor, PartitionCursor
from feedline.errors import WorkerStalledError
from feedline.loader.monitoring.autoscale import Autoscale
from feedline.loader.progress import Progress
from feedline.loader.ranks.agreement import Entry
from feedline.workers.base import BatchFuture, WorkerPool

T = TypeVar("T")


class PendingBatch(NamedTuple):
    """Batch on its way to the loop, with the cursor before it."""

    request: Any
    result: BatchResult
    cursor: Cursor | PartitionCursor


@dataclass(slots=True)
class FlowControl:
    """Order of delivery, and number of requests in flight.

    `ahead` requests are in flight while the loop computes; with 0, a batch is requested when it is due. With a `tuner`,
    `ahead` is `ahead_each` times its worker count.
    """

    ahead: int = 0
    in_order: bool = True
    tuner: Autoscale | None = None
    ahead_each: int = 2


class RequestWindow:
    """Draws requests, submits them to the pool, and receives their results.

    Interrupts may come between any two calls. A request between two steps is in an attribute, never in local variables
    alone: after an interrupt, the next call finds it there.
    """

    end_workers: Callable[[], bool] | None = None
    """Called with each batch once no request is left; True if the workers now end, while the loop computes."""
    _unsent: Any = None
    _taken: PendingBatch | None = None
    _broken: Exception | None = None
    _closed = _profiling = _exhausted = False

    def __init__(
        self,
        requests: Iterator[Any],
        pool: WorkerPool,
        progress: Progress,
        flow: FlowControl,
        restart: Callable[[Any], Iterator[Any]] | None,
    ) -> None:
        self._requests, self._pool, self._progress = requests, pool, progress
        self._flow, self._restart = flow, restart
        self._window: deque[BatchFuture] = deque()

    def _fill(self, depth: int) -> None:
        """Submit requests until `depth` are in flight; keep a sampler's error."""
        window, clock = self._window, self._progress.heartbeat.clock
        while len(window) < depth:
            if self._unsent is None and (
                self._exhausted or not clock.sample(self._draw_profiled if self._profiling else self._draw)
            ):
                return
            if not (window and window[-1].request is self._unsent):  # an interrupt came before the last line
                window.append(self._pool.submit(self._unsent))
            self._unsent = None

    def _draw_profiled(self) -> bool:
        drew: bool = in_profile("feedline.sample", self._draw)
        return drew

    def _draw(self) -> bool:
        """Draw the next request; False at the end and after errors."""
        try:
            # Not `next`: an interrupt cannot come between a step of a loop and the storing of its value.
            for self._unsent in self._requests:  # noqa: B020 - an attribute is the target
                return True
            self._exhausted = self._broken is None
        except Exception as error:  # noqa: BLE001 - raised when its turn comes
            self._broken, self._requests = error, iter(())
        except BaseException:
            if self._unsent is None:  # an interrupt has ended the generator
                self._requests = self._redraw()
            raise
        return False

    def _redraw(self) -> Iterator[Any]:
        """Requests after those in flight, drawn by a new generator."""
        if self._restart is None or isinstance(self._progress.cursor, PartitionCursor):
            self._broken = InterruptedError(
                "an interrupt has ended the iteration while the sampler drew the next batch: call iter(loader) again;"
                " after load_state_dict(loader.state_dict()) it continues here"
            )
            return iter(())
        # The requests in flight are still due: the new generator begins after them.
        cursor: Any = self._progress.cursor
        for request in self._requests_in_flight():
            cursor, _ = request.advance(cursor, None)
        return self._restart(cursor)

    def _requests_in_flight(self) -> list[Any]:
        """Requests whose batch was not delivered, in order."""
        return [future.request for future in self._window]

    def _next_is_done(self) -> bool:
        window = self._window
        return bool(window) and (window[0].done() if self._flow.in_order else any(future.done() for future in window))

    def _result(self) -> Entry | None:
        window = self._window
        try:
            if self._taken is None and not self._receive(window):
                return None
        except Exception:
            if self._closed:  # by a signal handler, while this call waited
                return None
            raise
        assert self._taken is not None
        request, result, _ = self._taken
        if window and window[0].request is request:
            del window[0]
        else:
            _remove(request, window)
        return request, result, None

    def _receive(self, window: deque[BatchFuture]) -> bool:
        """Take the next result; False at the end."""
        flow = self._flow
        if len(window) <= flow.ahead:
            self._fill(flow.ahead + 1)
        if not window:
            return False
        future = window[0] if flow.in_order else self._pool.wait_any(window)
        try:
            # Stored at once: after an interrupt, the next call continues from here.
            self._taken = tuple.__new__(PendingBatch, (future.request, future.result(), self._progress.cursor))
        except (WorkerStalledError, KeyboardInterrupt):
            raise  # the batch is still due: the next call continues to wait
        except BaseException as error:
            is_due = _is_due(future) if isinstance(error, Exception) else not future.done()
            if not is_due and future in window:  # a signal handler that closes the loader clears it
                window.remove(future)
            raise
        if self._closed:
            self._taken = None
            return False
        if self._exhausted and self.end_workers is not None and self.end_workers():
            self.end_workers = None
        return True


def _remove(request: Any, window: deque[BatchFuture]) -> None:
    """Remove a request from the window."""
    for future in window:
        if future.request is request:
            window.remove(future)
            return


def _is_due(future: BatchFuture) -> bool:
    """True if a future still has or expects its batch.

    If `result()` has raised before, the exception was then that of a signal handler, such as a time limit of a step.
    """
    if not future.done():
        return True
    try:
        future.result()
    except Exception:  # noqa: BLE001 - the first call has raised the future's own error
        return False
    return True


def in_profile(name: str, act: Callable[[], T]) -> T:
    """Call `act` in a range of torch's profiler; with `emit_nvtx`, of NVTX."""
    with torch.profiler.record_function(name):
        return act()
