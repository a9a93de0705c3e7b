"""The iteration over one epoch: requests in flight, results in order."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic_ns
from typing import Any, NamedTuple, Self, TypeVar, cast

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from feedline.core import finalizers
from feedline.core.batch import EMPTY_BATCH, BatchResult
from feedline.core.cursor import PartitionCursor
from feedline.core.telemetry import SpanTuple
from feedline.errors import note, note_rank
from feedline.loader.device import Delivered, InFlight, Stage
from feedline.loader.live import LiveRun
from feedline.loader.monitoring.autoscale import Autoscale
from feedline.loader.monitoring.heartbeat import QueueState
from feedline.loader.progress import Progress
from feedline.loader.ranks.agreement import Agreement, Entry
from feedline.loader.step_clocks import StepClocks
from feedline.loader.window import FlowControl, PendingBatch, RequestWindow, in_profile
from feedline.workers.base import BatchFuture, WorkerPool
from feedline.workers.inline import InlinePool

T = TypeVar("T")


_FIRST_BATCH_WAIT_S = 0.1
"""Seconds that the first publication waits for the first batch: otherwise, the batch would wait for the publication."""


_profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class LoaderArguments(NamedTuple):
    """Arguments of a loader, of which torch's iterators have copies."""

    dataset: Any
    index_sampler: Any
    auto_collation: bool
    collate_fn: Any
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    in_order: bool
    pin_memory: bool
    drop_last: bool
    timeout: float


class Iteration(RequestWindow, _BaseDataLoaderIter):
    """Iterator over the rest of an epoch.

    Frameworks recognize torch's base class, but none of its code runs.

    It stays usable after a batch has raised: the next call returns the next batch, and the failed batch counts as
    undelivered in the state.
    """

    # Defaults of the class: a short epoch takes little more time than these assignments.
    late_start: Callable[[], Iterator[Any] | None] | None = None
    """Called before the first batch. Returns requests that replace those of the constructor, or None."""
    monitor: object = None
    """The loader's monitor. It must outlive the loader, which `for batch in DataLoader(...)` drops at once."""
    rank = (0, 1)
    """Rank and number of ranks, for errors."""
    agreement: Agreement | None = None
    """The rule for ranks with different numbers of batches."""
    last_steps: Callable[[Any, Delivered], Any] | None = None
    """`last_steps(batch, delivered)` returns the batch to deliver, after the stage."""
    live: LiveRun | None = None
    """The epoch of a live stream."""
    arguments: LoaderArguments | None = None
    """The loader's arguments, under torch's names. The loader itself may be dropped before its iteration."""
    _latest: list[Callable[[], Iteration | None]] | None = None
    """The latest iteration over the same persistent workers; all of them share this list."""
    _staged_head: PendingBatch | None = None
    _asked = _has_shut_down = False

    def __init__(
        self,
        requests: Iterator[Any],
        pool: WorkerPool,
        progress: Progress,
        flow: FlowControl,
        clocks: StepClocks | None = None,
        *,
        stage: Stage | None = None,
        length: Callable[[], int] = lambda: 0,
        on_close: Callable[[], None] | None = None,
        restart: Callable[[Any], Iterator[Any]] | None = None,
    ) -> None:
        super().__init__(requests, pool, progress, flow, restart)
        self._stage, self._length = stage, length
        self._staged: deque[Entry | Exception] = deque()
        self._clocks = clocks or StepClocks(has_processes=bool(pool.processes), works_ahead=bool(flow.ahead))
        self.on_shutdown: Callable[[], Callable[[], None] | None] = _no_shutdown
        """Returns the function that stops persistent workers, or None after the loader was deleted."""
        self.delivered: Callable[[], int] = _no_batches
        """Number of batches of the epoch that the loop has received, including those before a resume."""
        held = self._window, self._staged, stage, on_close
        if stage is None and on_close is None:
            self._release: Callable[[], Any] = partial(_release, *held)  # it holds nothing that must end
        else:
            # Not __del__: an iterator held by a traceback dies in a cycle, maybe after the objects it refers to.
            self._release = weakref.finalize(self, finalizers.run, _release, *held)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            if _profiler_enabled():
                return self._deliver_profiled()
            batch = self._deliver()
            if self._stage is None:  # the usual case, without a call
                self._taken = None
            else:
                self._forget()
            return batch
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                self._fail(error)
            self._progress.heartbeat.mark_idle()
            if not isinstance(error, StopIteration):
                note_rank(error, *self.rank)
            raise

    def _fail(self, error: Exception) -> None:
        """Count the time until an error, and publish it."""
        heartbeat = self._progress.heartbeat
        self._progress.totals.add_end(heartbeat.waits_from_ns, monotonic_ns())
        heartbeat.clock.leave()
        heartbeat.mark_idle()
        heartbeat.publish(self.queue, error=error)

    def _deliver_profiled(self) -> Any:
        self._profiling = True
        try:
            batch = in_profile("enumerate(DataLoader)#feedline.__next__", self._deliver)
            self._forget()
            return batch
        finally:
            self._profiling = False

    def _deliver(self) -> Any:
        progress, clocks = self._progress, self._clocks
        heartbeat = progress.heartbeat
        called_ns = heartbeat.clock.call()
        if called_ns >= clocks.due_ns:
            clocks.call(called_ns)
        # Before the wait: if it never ends, its request is on the page.
        if called_ns >= heartbeat.due_ns and not self._first_batch_is_due():
            heartbeat.publish(self.queue)
        if self.late_start is not None or self.live is not None:
            self._resume_epoch()
        entry = self._next_with_batch()
        if self.agreement is not None and self._broken is None and not self._closed:
            entry = self.agreement.choose_entry(entry, self._stage)
        if entry is None:
            return self._after_last()
        request, result, moving = entry
        on_host = self._stage is None and self.last_steps is None
        batch = result.batch if on_host else self._place(request, result, moving)
        samples = self._advance(request, result)
        spans = result.spans
        if clocks.spans:
            spans += clocks.spans
            clocks.spans = []
        totals = progress.totals
        longest_ns = heartbeat.clock.deliver(totals.sums, spans, samples, request.epoch, request.number)
        if longest_ns > totals.slow_ns:
            totals.keep_slow(longest_ns, spans, request)
        if clocks.read:
            clocks.deliver(batch)
        if heartbeat.inspect is not None or self._flow.tuner is not None:
            self._observe(batch)
        return batch

    def _after_last(self) -> Any:
        """End the epoch; continue with the latest iteration, if that is another."""
        self._taken = None
        self._end()
        latest = self._latest[0]() if self._latest else None
        if latest is None or latest is self:
            raise StopIteration
        return next(latest)

    def _observe(self, batch: Any) -> None:
        """Let the monitor inspect a batch, and the tuner its times."""
        inspect, self._progress.heartbeat.inspect = self._progress.heartbeat.inspect, None
        if inspect is not None:
            inspect(batch)
        if self._flow.tuner is not None:
            self._tune(self._flow.tuner, self._progress.totals.latest())

    def _first_batch_is_due(self) -> bool:
        """True if the first batch arrives within `_FIRST_BATCH_WAIT_S`; False after one call.

        A publication before this batch would only delay the batch.
        """
        if self._asked or not self._window or not self._flow.in_order:
            return False
        self._asked = True
        wait = getattr(self._window[0], "wait", None)
        return wait is not None and bool(wait(_FIRST_BATCH_WAIT_S))

    def _resume_epoch(self) -> None:
        """Begin an epoch set late; acknowledge batches of live streams."""
        if self.late_start is not None:
            self._start_again(self.late_start())
        if self.live is not None and not self._closed:
            self.live.acknowledge(cast("PartitionCursor", self._progress.cursor))

    def _place(self, request: Any, result: BatchResult, moving: Any) -> Any:
        """The batch on its device, after the last steps."""
        batch = result.batch
        if self._stage is not None:
            try:
                batch = self._clocks.timed(_stage_name(moving), self._finish, self._stage, moving)
            except Exception as error:
                _name_row(error, request)
                self._forget()
                raise
        if self.last_steps is None:
            return batch
        delivered = Delivered(request, result)
        try:
            return self._clocks.timed("device_transform", self.last_steps, batch, delivered)
        except Exception:
            self._forget()
            raise

    def _next_with_batch(self) -> Entry | None:
        """The next entry that has a batch; None at the end."""
        while True:
            if self.live is not None and self.live.is_over(cast("PartitionCursor", self._progress.cursor)):
                return None
            take = self._result if self._stage is None else self._due
            due = in_profile("feedline.receive", take) if self._profiling else take()
            if due is None or due[1].batch is not EMPTY_BATCH:
                return due
            self._advance(due[0], due[1])
            self._forget()

    def _finish(self, stage: Stage, moving: Any) -> Any:
        if self._profiling:
            return in_profile("feedline.deliver", lambda: stage.finish(moving))
        return stage.finish(moving)

    def _advance(self, request: Any, result: BatchResult) -> int:
        """Record a batch as delivered, once; return its number of samples.

        If an interrupt comes before the batch is returned, the next call delivers it again, but does not record it.
        """
        taken, progress = self._taken if self._stage is None else self._staged_head, self._progress
        if self.agreement is not None and self.agreement.is_repeating:
            return 0
        if taken is not None and taken.cursor is not progress.cursor:
            return 0
        try:
            return progress.advance(request, result)
        except Exception:  # such as too many skipped samples: the next call continues after this batch
            self._forget()
            raise

    def _forget(self) -> None:
        """Drop the current batch, so that the next call continues after it."""
        # No calls here: an interrupt may follow each.
        if self._stage is None:
            self._taken = None
        elif self._staged_head is not None:
            self._staged_head = None
            if self._staged:  # a signal handler that closes the loader clears it
                del self._staged[0]

    def __len__(self) -> int:
        return self._length()

    def __getattr__(self, name: str) -> Any:
        """An argument of the loader: torch's iterators have them as attributes."""
        arguments = self.arguments
        if arguments is None or name[1:] not in LoaderArguments._fields or name[0] != "_":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(arguments, name[1:])

    @property
    def _shutdown(self) -> bool:
        """Torch's name for the end of the workers.

        Persistent ones outlive their iterations.
        """
        return self._has_shut_down or (self._closed and not self._persistent_workers)

    def queue(self) -> QueueState:
        """State of the requests in flight; for the thread of the loop."""
        window, ready = self._window, len(self._staged)
        if self._flow.ahead:
            ready += sum(future.done() for future in window)
        return QueueState(ready, len(window) + len(self._staged), self._flow.ahead)

    @property
    def closed(self) -> bool:
        """True after the end of the epoch, or after `close`."""
        return self._closed

    def advances(self, progress: Progress | None) -> bool:
        """True if this iteration advances `progress`."""
        return self._progress is progress

    @property
    def _workers(self) -> list[Any]:
        """The worker processes, under torch's name for them, which other tools read."""
        return self._pool.processes

    @property
    def _num_yielded(self) -> int:  # type: ignore[override]
        """Torch's name for `delivered()`, which checkpoints of SpeechBrain read."""
        return self.delivered()

    def follow(self, former: Iteration | None) -> None:
        """Continue for `former` once that one has ended.

        torch has one iterator for all epochs of persistent workers: `iter(loader)` begins it again for all who hold it.
        """
        if former is not None:
            if former._latest is None:
                former._latest = []
            self._latest = former._latest
            self._latest[:] = [weakref.ref(self)]

    def start(self) -> None:
        """Submit the first requests before the loop needs a batch."""
        self._fill(self._flow.ahead)

    def open_stream(self) -> None:
        """Open the stream of a loader without workers."""
        self._fill(1)
        if self._window and isinstance(self._pool, InlinePool):
            self._pool.open(self._window[0].request)

    def close(self) -> None:
        """Cancel requests in flight; the position in the state does not change."""
        self._closed = True
        self._requests = iter(())
        self._progress.heartbeat.mark_idle()
        self._release()

    def _shutdown_workers(self) -> None:
        """Stop the workers, persistent ones too.

        Other tools call it by this name of torch's.
        """
        self.close()
        self._has_shut_down = True
        stop = self.on_shutdown()
        if stop is not None:
            stop()

    def _start_again(self, requests: Iterator[Any] | None) -> None:
        self.late_start = None
        if requests is None or self._closed:
            return
        for future in self._window:
            future.cancel()
        self._window.clear()
        self._requests, self._broken, self._exhausted = requests, None, False

    def _end(self) -> None:
        error, self._broken = self._broken, None
        if error is not None:
            raise error
        if not self._closed:  # a call after the end, or after the user closed it, must not end another epoch
            progress, began_ns = self._progress, monotonic_ns()
            progress.end_epoch()
            progress.totals.add_end(progress.heartbeat.waits_from_ns, began_ns)
            progress.heartbeat.mark_idle()
            progress.heartbeat.publish(self.queue, epoch_ends=True)
            self.close()
            progress.totals.add_closing(monotonic_ns() - began_ns)

    def _tune(self, tuner: Autoscale, spans: Sequence[SpanTuple]) -> None:
        workers = tuner.observe(spans)
        if workers is not None:
            self._pool.resize(workers)
            self._flow.ahead = workers * self._flow.ahead_each

    def _requests_in_flight(self) -> list[Any]:
        staged = [entry[0] for entry in self._staged if not isinstance(entry, Exception)]
        return staged + super()._requests_in_flight()

    def _due(self) -> Entry | None:
        """Wait for the next batch of the stage; None at the end."""
        stage = self._stage
        assert stage is not None
        if not self._staged and not self._stage_one(stage):
            return None
        while self._next_is_done() and stage.has_room() and self._stage_one(stage):
            pass
        entry = self._staged[0]
        if isinstance(entry, BaseException):
            del self._staged[0]
            raise entry
        # It stays in its place until it is delivered: after an interrupt, the next call delivers it.
        if self._staged_head is None:
            self._staged_head = PendingBatch(entry[0], entry[1], self._progress.cursor)
        return entry

    def _stage_one(self, stage: Stage) -> bool:
        """Start the stage for the next result; keep its error until due."""
        entry: Entry | None = None
        staged: Entry | Exception
        try:
            entry = self._result()
            if entry is None:
                return False
            request, result, _ = entry
            if result.batch is not EMPTY_BATCH:  # from here on the stage owns the host memory
                moving = self._clocks.timed("copy", stage.start, result.batch)
                staged = request, result._replace(batch=None), moving
            else:
                staged = entry
        except Exception as error:  # noqa: BLE001 - raised when its turn comes
            if entry is not None:
                _name_row(error, entry[0])
            staged = error
        # Not `append`: an interrupt may follow a call, and the batch would be staged again.
        self._staged += (staged,)
        self._taken = None
        return True


def _stage_name(moving: Any) -> str:
    """The stage in which the loop waits for a batch."""
    return "device_decode" if isinstance(moving, InFlight) and moving.decodes else "copy"


def live_iterations(loader: Any) -> list[Iteration]:
    """Iterations of a loader that still exist."""
    while True:
        with suppress(RuntimeError):  # another thread began an epoch meanwhile
            return list(loader._fl_live)


def is_iterated(loader: Any) -> bool:
    """True if an iteration of a loader goes on."""
    return not all(iteration.closed for iteration in live_iterations(loader))


def _no_shutdown() -> None:
    """Return no function: for an iteration without a loader."""


def _no_batches() -> int:
    """Count no batches: for an iteration without a loader."""
    return 0


def _name_row(error: Exception, request: Any) -> None:
    """Name the failed sample in an error, or the batch without memory."""
    if isinstance(error, torch.OutOfMemoryError):
        note(error, f"feedline: {request}, stage device")
    row = getattr(error, "row", None)
    if row is not None and row < len(getattr(request, "positions", ())):
        place = f"epoch {request.epoch}, position {request.positions[row]}, stage device"
        remedy = "leave out DecodeOnDevice, so that on_error='skip' leaves out such samples"
        note(error, f"feedline: sample {request.indices[row]} ({place}); {remedy}")


def _release(
    window: deque[BatchFuture],
    staged: deque[Entry | Exception],
    stage: Stage | None,
    on_close: Callable[[], None] | None,
) -> None:
    for future in window:
        future.cancel()
    window.clear()
    staged.clear()
    if stage is not None:
        stage.close()
    if on_close is not None:
        on_close()
