"""The loop: requests to the pool, results in order, stages ahead of delivery, and the one cursor."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Self

import torch

from feedline.core import store_metrics
from feedline.core.batch import EMPTY_BATCH, BatchResult
from feedline.core.cursor import Cursor, PartitionCursor
from feedline.core.telemetry import MAIN, SpanTuple
from feedline.errors import WorkerStalledError
from feedline.loader.autoscale import Autoscale
from feedline.loader.checks import DuplicateStreamCheck, LengthCheck
from feedline.loader.device import Stage
from feedline.loader.error_policy import Quarantine
from feedline.loader.report.stats import Totals
from feedline.workers.base import BatchFuture, WorkerPool

_profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


@dataclass(slots=True)
class Progress:
    """What the training loop has received. `advance` is the only place where that changes."""

    cursor: Cursor | PartitionCursor
    quarantine: Quarantine
    totals: Totals
    twins: DuplicateStreamCheck | None = None
    told_length: LengthCheck | None = None
    over: bool = False
    samples: int | None = None
    """How many of this epoch were delivered; None in an epoch that was taken up in its midst, where nobody knows."""
    stores_before: store_metrics.StoreStatistics = field(default_factory=store_metrics.statistics)

    def advance(self, request: Any, built: BatchResult) -> int:
        """Record one batch as delivered; how many samples it has."""
        if built.digest is not None and self.twins is not None:
            self.twins.add(request.partition, built.digest)
        if self.told_length is not None and built.batch is not EMPTY_BATCH:
            self.told_length.count()
        if built.store_counts:
            store_metrics.count(**built.store_counts)
        left_out = 0
        if built.skipped:
            self.quarantine.add(built.skipped)
            left_out = sum(skip.replaced_by is None for skip in built.skipped)
        self.cursor, samples = request.advance(self.cursor, built.mark)
        delivered = int(samples) - left_out
        if self.samples is not None:
            self.samples += delivered
        return delivered

    def end_epoch(self) -> None:
        """Record that the loop has seen the end of the epoch; raises if every sample of it failed."""
        if self.samples == 0:
            self.quarantine.refuse_empty_epoch()
        self.cursor = self.cursor.next_epoch()
        self.quarantine.this_epoch = 0
        self.over = True


_Entry = tuple[Any, BatchResult, Any]


@dataclass(slots=True)
class Flow:
    """How far the engine works ahead of the loop.

    `ahead` requests are kept in flight while the loop computes; 0 asks for each batch only when it is due. With a
    `tuner` that number follows its worker count, `ahead_each` per worker.
    """

    ahead: int = 0
    in_order: bool = True
    tuner: Autoscale | None = None
    ahead_each: int = 2


class Iteration:
    """One pass over the rest of an epoch: the iterator that a loader gives.

    An exception from a batch leaves the iterator usable: the next call goes on with the next batch, and the batch
    that failed stays undelivered in the state.
    """

    def __init__(
        self,
        requests: Iterator[Any],
        pool: WorkerPool,
        progress: Progress,
        flow: Flow,
        *,
        stage: Stage | None = None,
        length: Callable[[], int] = lambda: 0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._requests, self._pool, self._progress = requests, pool, progress
        self._flow, self._stage, self._length = flow, stage, length
        self._window: deque[BatchFuture] = deque()
        self._staged: deque[_Entry | Exception] = deque()
        self._broken: Exception | None = None
        self._closed = False
        self._left_ns = monotonic_ns()
        # Not __del__: an iterator that an exception's traceback holds dies in a cycle, together with all it refers to.
        self._finalizer = weakref.finalize(self, _let_go, self._window, self._staged, stage, on_close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if _profiler_enabled():
            with torch.profiler.record_function("enumerate(DataLoader)#feedline.__next__"):
                return self._deliver()
        return self._deliver()

    def _deliver(self) -> Any:
        called_ns = monotonic_ns()
        progress = self._progress
        while True:
            due = self._due()
            if due is None:
                self._end()
                raise StopIteration
            request, built, moving = due
            if built.batch is not EMPTY_BATCH:
                break
            progress.advance(request, built)
        batch = built.batch if self._stage is None else self._stage.finish(moving)
        samples = progress.advance(request, built)
        now = monotonic_ns()
        spans = built.spans
        spans.append(("step", self._left_ns, called_ns, MAIN))
        spans.append(("wait", called_ns, now, MAIN))
        progress.totals.add(spans, samples)
        if self._flow.tuner is not None:
            self._tune(self._flow.tuner, spans)
        self._left_ns = now
        return batch

    def __len__(self) -> int:
        return self._length()

    @property
    def _workers(self) -> list[Any]:
        """The worker processes, under the name by which tools know them from torch."""
        return self._pool.processes

    def start(self) -> None:
        """Submit the first requests now, before the loop asks for a batch."""
        self._fill(self._flow.ahead)

    def close(self) -> None:
        """Cancel what is in flight; the state stays where the loop was."""
        self._closed = True
        self._requests = iter(())
        self._finalizer()

    def _end(self) -> None:
        error, self._broken = self._broken, None
        if error is not None:
            raise error
        if not self._closed:  # else it has ended before, or was cancelled: the state stays
            self._progress.end_epoch()
            self.close()

    def _tune(self, tuner: Autoscale, spans: list[SpanTuple]) -> None:
        workers = tuner.observe(spans)
        if workers is not None:
            self._pool.resize(workers)
            self._flow.ahead = workers * self._flow.ahead_each

    def _fill(self, depth: int) -> None:
        """Submit until `depth` requests are in flight. An error of the sampler waits for its turn."""
        window = self._window
        while len(window) < depth:
            try:
                request = next(self._requests)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001 - raised when its turn comes
                self._broken, self._requests = error, iter(())
                return
            window.append(self._pool.submit(request))

    def _due(self) -> _Entry | None:
        """The next batch for the loop, waiting for it; None at the end."""
        stage = self._stage
        if stage is None:
            return self._result()
        if not self._staged and not self._stage_one(stage):
            return None
        while self._next_is_done() and stage.has_room() and self._stage_one(stage):
            pass
        entry = self._staged.popleft()
        if isinstance(entry, BaseException):
            raise entry
        return entry

    def _stage_one(self, stage: Stage) -> bool:
        """Start the stage for the next result; what fails ahead of its turn is kept until then."""
        try:
            entry = self._result()
            if entry is None:
                return False
            request, built, _ = entry
            if built.batch is not EMPTY_BATCH:  # from here on the stage decides how long the host's memory is needed
                moving = stage.start(built.batch)
                built = built._replace(batch=None)
                self._staged.append((request, built, moving))
            else:
                self._staged.append(entry)
        except Exception as error:  # noqa: BLE001 - raised when its turn comes
            self._staged.append(error)
        return True

    def _next_is_done(self) -> bool:
        window = self._window
        return bool(window) and (window[0].done() if self._flow.in_order else any(ticket.done() for ticket in window))

    def _result(self) -> _Entry | None:
        window = self._window
        if len(window) <= self._flow.ahead:
            self._fill(self._flow.ahead + 1)
        if not window:
            return None
        ticket = window[0] if self._flow.in_order else self._pool.wait_any(window)
        try:
            built = ticket.result()
        except (WorkerStalledError, KeyboardInterrupt):
            raise  # the batch is still due: the next call goes on waiting for it
        except BaseException:
            window.remove(ticket)
            raise
        window.remove(ticket)
        return ticket.request, built, None


def _let_go(
    window: deque[BatchFuture],
    staged: deque[_Entry | Exception],
    stage: Stage | None,
    on_close: Callable[[], None] | None,
) -> None:
    for ticket in window:
        ticket.cancel()
    window.clear()
    staged.clear()
    if stage is not None:
        stage.close()
    if on_close is not None:
        on_close()
