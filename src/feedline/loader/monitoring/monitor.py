"""Monitor of a loader: its statistics over all epochs, and their publication.

The loop's own thread publishes, between two batches; there is no other thread.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, count
from pathlib import Path
from time import monotonic_ns, time
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from feedline.core import store_metrics
from feedline.core.dataset import declared
from feedline.core.page import BATCHES, Page, as_json
from feedline.core.proc import ProcessStat
from feedline.core.store_metrics import StoreStatistics
from feedline.core.telemetry import Span
from feedline.errors import ArgumentError
from feedline.loader.monitoring.diagnosis import USUAL_VERDICT_NS, Arguments, verdict_of, verdict_pause_ns
from feedline.loader.monitoring.heartbeat import NEVER_NS, Heartbeat, QueueState
from feedline.loader.monitoring.identity import identity_of, log_path
from feedline.loader.monitoring.machine import MachineFigures
from feedline.loader.monitoring.memory_trend import MemoryTrend
from feedline.loader.monitoring.sending import SendingMeasurement
from feedline.loader.plan import Plan
from feedline.loader.pools import LoaderPools
from feedline.loader.progress import Progress
from feedline.loader.report import Stats, Totals, Verdict
from feedline.loader.report.audit_log import AuditLog, audit_path
from feedline.loader.report.figures import figures_of, plain_indices, verdict_figures, what_if
from feedline.loader.report.page_html import RankReport
from feedline.loader.report.page_html import page as page_text
from feedline.loader.report.raised import RaisedError
from feedline.loader.report.run_log import History, HistoryPoint, RunLog, path_of_rank
from feedline.loader.report.stats import SlowBatch
from feedline.loader.report.verdict import FEW_BATCHES

_log = logging.getLogger("feedline")


INTERVAL_NS = 250_000_000
"""Shortest time between two publications."""


PAUSE_FACTOR = 500
"""Publications take at most 1 / `PAUSE_FACTOR` of the time: after a slow one, the next is later."""


MEASURE_AFTER_NS = 50_000_000
"""Time after a publication, and after the start of an iteration, at which other measurements may begin."""


MOST_NS = 2_000_000_000
"""Longest time between publications of a loop that receives batches: the first one of a process may be very slow."""


_OF_NOW = (
    "stores", "epoch", "position", "length", "ready", "in_flight", "worker_nbytes", "worker_growth_nbytes",
    "padding_share", "throttled_share", "contended_share", "outside_share", "step_outside_share", "gpu_utilization",
    "others_cpus", "workers", "restarts", "skipped", "latest_skipped",
)  # fmt: skip
"""Figures of the present that a verdict on the previous epoch also uses."""


EARLY_PAUSE_FACTOR = 50
"""Early publications of all loaders of the process take at most 1 / `EARLY_PAUSE_FACTOR` of the time.

These are the ones before the interval has passed, of a loader's first batch and of ends of epochs. Many loops take less
time than a publication.
"""


@dataclass(slots=True)
class _EarlyPublications:
    due_ns: int = 0


_early = _EarlyPublications()


_IDLE = Heartbeat()
"""The heartbeat of a loader before its first iteration."""


class _FigureSources(NamedTuple):
    """The parts of a loader that have figures."""

    pools: LoaderPools
    progress: Progress
    plan: Plan
    dataset: Any
    length: int | None
    is_pageable: bool
    """True if batches stay in pageable memory of the CPU."""
    collated: bool
    """True for default collate."""


class Monitor:
    """Statistics of one loader, its page, history and run log.

    `stats` may be called by any thread, and never waits for a batch. Everything else belongs to the thread of the loop.
    """

    def __init__(self) -> None:
        self.whole = Totals()
        self.history = History()
        self.identity: dict[str, Any] = {}
        self._loader: Callable[[], Any] = lambda: None
        self._arguments: Arguments | None = None
        self._log: RunLog | None = None
        self._sources: _FigureSources | None = None
        self._former: Totals | None = None
        self._heartbeat = _IDLE
        self._queue = QueueState()
        self._machine = MachineFigures(_workers_of_all)
        self._stores_before: StoreStatistics | None = None
        self._memory = MemoryTrend()
        self._publication_due_ns = 0
        self.sending = SendingMeasurement()
        """Cost of sending a batch from a worker process, for loops without worker processes."""
        self._addresses: dict[Any, str] = {}
        self.verdict: dict[str, Any] = {}
        self._verdict_ns = USUAL_VERDICT_NS
        self._judged_few = False
        # A loader of a few seconds ends before anything reads its verdict.
        self._advice_due_ns = monotonic_ns() + verdict_pause_ns(0, self._verdict_ns)
        self._page: Page | None = None
        self._owner = 0
        self._met: tuple[str, float] | None = None
        self._raised: RaisedError | None = None
        self._raised_in = 0
        """Number of the iteration that raised it."""
        self._hooks = self._weak(Monitor._publish), self._weak(Monitor._keep_workers)

    def new_heartbeat(self) -> Heartbeat:
        """The heartbeat of a new iteration, for `begin`."""
        due_ns = min(self._publication_due_ns, monotonic_ns() + MEASURE_AFTER_NS)  # short epochs end before
        return Heartbeat(self._open_page(), due_ns, *self._hooks)

    def begin(self, progress: Progress, plan: Plan, pools: LoaderPools, loader: Any) -> None:
        """Follow a new iteration."""
        if not self.identity:
            self.identity = identity_of(loader, plan, _register(self, type(loader.dataset).__name__))
            path = log_path(loader)
            if path is not None:
                self._log = RunLog(path_of_rank(path, self.identity["rank"], self.identity["world_size"]))
                self._advice_due_ns = 0
        if self._stores_before is None:
            self._stores_before = progress.stores_before
            self._machine.begin()
        former = self._sources
        self._keep_totals()
        is_pageable = loader._fl.device is None and not loader.pin_memory
        is_default = loader.collate_fn is None or loader.collate_fn is default_collate
        collated = is_default and loader.batch_size is not None
        self._sources = _FigureSources(pools, progress, plan, loader.dataset, _length(plan), is_pageable, collated)
        # `for batch in DataLoader(...)` drops the loader at once: its arguments are enough for a verdict.
        self._loader, self._arguments = weakref.ref(loader), Arguments(loader, self._sources.length)
        self._met = loader._fl_contract.met if loader._fl_world_size > 1 else None
        self._memory.persistent = loader.persistent_workers
        self._machine.follow_loop(loader._fl.device)
        progress.totals.sums.in_order = bool(loader.in_order)
        if self._log is not None:
            # An iteration that was left before its first batch has no record.
            resumed = loader._fl_resume is not None or _has_unwritten_resume(former)
            audited = audit_path(self._log.path)
            stops = loader._fl_ranks.uneven == "stop"
            progress.audit = AuditLog(audited, self.identity, plan, loader.dataset, resumed=resumed, stops=stops)
        self._follow(progress)

    def begin_again(self, progress: Progress) -> None:
        """Follow a new iteration with the same arguments."""
        assert self._sources is not None
        former = self._sources.progress.totals
        if former.sums.batches:
            self._former = former
        progress.totals.sums.in_order = former.sums.in_order
        pools, _, *others = self._sources
        self._sources = tuple.__new__(_FigureSources, (pools, progress, *others))
        self._machine.follow_loop(None)
        self._follow(progress)

    def _keep_totals(self) -> None:
        if self._sources is not None and self._sources.progress.totals.batches:
            self._former = self._sources.progress.totals

    def _follow(self, progress: Progress) -> None:
        self._heartbeat = progress.heartbeat
        self._heartbeat.page.words[BATCHES] = self.whole.batches

    @property
    def has_log(self) -> bool:
        """True if a run log is written."""
        return self._log is not None

    def stats(self) -> Stats:
        """The figures so far."""
        sources = self._sources
        if sources is None:
            return Stats()
        progress, pools = sources.progress, sources.pools
        quarantine = progress.quarantine
        pool = pools.pool_statistics()
        # A loop that waits for its first batch has none: they take a while.
        machine = self._machine.system(
            pool.pids, keeps=not self._heartbeat.page.words[BATCHES], is_over=progress.is_over
        )
        common: dict[str, Any] = {
            "epoch": progress.cursor.epoch - progress.is_over,
            "position": _position(sources),
            "length": sources.length,
            "ready": self._queue.ready,
            "in_flight": self._queue.in_flight,
            "worker_nbytes": machine.worker_nbytes,
            "worker_growth_nbytes": self._memory.growth(),
            "throttled_share": machine.throttled_share,
            "gpu_utilization": machine.gpu_utilization,
            "contended_share": pool.contended_share,
            "outside_share": pool.outside_share,
            "step_outside_share": pool.step_outside_share,
            "others_cpus": self._machine.others_cpus,
            "latest_skipped": quarantine.latest,
        }
        stores = store_metrics.statistics()
        unfinished_ns = progress.totals.unfinished_ns(self._heartbeat.waits_from_ns, monotonic_ns())
        epoch = replace(progress.totals.stats(unfinished_ns), stores=stores.since(progress.stores_before), **common)
        skipped = quarantine.ended if progress.is_over else quarantine.this_epoch
        epoch = pools.with_pool_figures(epoch, skipped, since_epoch=True)
        before = self._stores_before or StoreStatistics()
        whole = replace(self.whole.stats(unfinished_ns), stores=stores.since(before), **common)
        whole = pools.with_pool_figures(whole, quarantine.count)
        return replace(
            whole, slowest=self._with_addresses(whole), since_epoch=replace(epoch, slowest=self._with_addresses(epoch))
        )

    def verdict_inputs(self) -> tuple[Stats, list[list[Span]]]:
        """Statistics and spans of the epoch that a verdict is about.

        It is the previous epoch until the current one has `FEW_BATCHES` batches, or as many as the previous one had.
        """
        whole, former = self.stats(), self._former
        # A failure of any epoch is worth a note.
        epoch = replace(whole.since_epoch or Stats(), restarts=whole.restarts, skipped=whole.skipped)
        recent = [] if self._sources is None else self._sources.progress.totals.recent
        if former is None:
            return epoch, recent
        before = former.stats()
        if epoch.batches >= min(FEW_BATCHES, before.batches):
            return replace(epoch, closing_s=epoch.closing_s or before.closing_s), recent
        return replace(before, **{name: getattr(epoch, name) for name in _OF_NOW}), former.recent

    def note_error(self, error: Exception) -> None:
        """Publish an error of `iter(loader)`."""
        publish, _ = self._hooks
        publish(QueueState, error=error)

    @property
    def raised(self) -> RaisedError | None:
        """The latest error of the loader."""
        raised = self._raised
        if raised is None:
            return None
        return raised._replace(went_on=self.whole.batches > raised.batches or self._iteration != self._raised_in)

    @property
    def _iteration(self) -> int:
        return 0 if self._sources is None else self._sources.progress.run

    def waiting_s(self) -> float:
        """Seconds of the current wait; 0 if the loop does not wait."""
        waits_from_ns = self._heartbeat.waits_from_ns
        return max(monotonic_ns() - waits_from_ns, 0) / 1e9 if waits_from_ns else 0.0

    def figures(self) -> dict[str, Any]:
        """The statistics as JSON values, with the labels of the loader."""
        raised = self.raised
        return {
            "time_s": time(),
            **self.identity,
            **figures_of(self.stats()),
            "verdict": self.verdict,
            "raised": None if raised is None else raised._asdict(),
            "met": self._met,
        }

    def write_page(self, path: str | os.PathLike[str], verdict: Verdict) -> None:
        """Write the report page; ArgumentError before the first iteration."""
        if self._sources is None:
            if self._raised is not None:
                raise ArgumentError(f"there is nothing to report. {self._raised.text}")
            raise ArgumentError("there is nothing to report yet: iterate over the loader first")
        self.verdict = verdict_figures(verdict)
        figures = self.figures()
        figures["what_if"] = [] if verdict.replayed is None else what_if(verdict.replayed)
        figures["lines"] = [line._asdict() for line in verdict.lines]
        points = [*self.history.points, _point(figures)]
        batches = self._sources.progress.totals.recent_batches()
        report = RankReport(figures, [point._asdict() for point in points], batches)
        Path(path).write_text(page_text([report]), encoding="utf-8")

    def close(self) -> None:
        """Close the page; a later iteration opens another one."""
        page, self._page = self._page, None
        if page is not None:
            page.close()

    def _open_page(self) -> Page:
        # A forked process has its parent's page, too, and must not write to it.
        if self._page is None or self._owner != os.getpid():
            self._page, self._owner = Page(), os.getpid()
        return self._page

    def _weak(self, method: Callable[..., None]) -> Callable[..., None]:
        reference = weakref.ref(self)  # an iteration that is kept must not keep the page open

        def call(*arguments: Any, **named: Any) -> None:
            monitor = reference()
            try:
                if monitor is not None:
                    method(monitor, *arguments, **named)
            except Exception:  # noqa: BLE001 - the loop continues, whatever is wrong with its figures
                _warn_of_figures()

        return call

    def _keep_workers(self) -> None:
        """Read the figures of the workers for the last time."""
        if self._sources is not None:
            self._machine.keep_workers(self._sources.pools.pool_statistics().pids)
            self._machine.watch_others(epoch_ends=True)

    def _publish(
        self, queue: Callable[[], QueueState], *, epoch_ends: bool = False, error: Exception | None = None
    ) -> None:
        began_ns, event = monotonic_ns(), self._event(error, epoch_ends=epoch_ends)
        if began_ns < self._publication_due_ns and event == "interval":
            self._begin_measurements(began_ns)
            return
        sources = self._sources
        if sources is not None and sources.progress.audit is not None:
            sources.progress.audit.flush(ended=epoch_ends)
        self._heartbeat.due_ns = NEVER_NS  # an error below must not be repeated with each batch
        self._queue = queue()
        self._machine.leave_loop()
        page = self._page
        if sources is None or page is None:
            return
        statistics = sources.pools.pool_statistics()
        is_early = event != "raised" and (began_ns < self._publication_due_ns or not self._publication_due_ns)
        workers_stay = self._memory.persistent or not statistics.pids  # the figures of others are read now or never
        if is_early and began_ns < _early.due_ns and workers_stay and self._log is None:
            self._postpone(page, sources, began_ns)
            return
        self._read_workers(statistics.pids, sources.progress.cursor.epoch, epoch_ends=epoch_ends)
        if event != "interval" and self._log is not None and self._judged_few:
            self._advice_due_ns = 0  # a short run, whose log is to say more than a first impression
        self._update_verdict(began_ns)
        figures = self.figures()
        now_s = figures["time_s"]
        if figures["length"] and not epoch_ends:
            self._memory.add(figures["epoch"] + figures["position"] / figures["length"], figures["worker_nbytes"])
        if epoch_ends:
            self._machine.forget_workers()
        if epoch_ends or self.history.is_due(now_s):
            self.history.add(_point(figures))
        if self._log is not None:
            self._log.write(figures, event)
        recent = self.history.points[-_SHOWN:]
        live = {"ahead": self._queue.ahead, "status_fd": statistics.status_fd, "history": recent}
        page.publish({**figures, **live})
        self._plan_next(began_ns, is_early=is_early)

    def _event(self, error: Exception | None, *, epoch_ends: bool) -> str:
        """Name of the event, for the run log; keeps an error."""
        if error is None:
            return "epoch" if epoch_ends else "interval"
        self._raised, self._raised_in = RaisedError.of(error, self.whole.batches), self._iteration
        return "raised"

    def _read_workers(self, pids: tuple[int, ...], epoch: int, *, epoch_ends: bool) -> None:
        """Read the figures of the workers, unless they are kept."""
        if not self._machine.keeps_workers:
            if epoch_ends:  # once, for all that is published
                self._machine.keep_workers(pids)
            self._machine.watch_others(epoch_ends=epoch_ends)
        if epoch_ends:
            self._memory.add(epoch, self._machine.resident_nbytes(pids), ends=True, workers=len(pids))

    def _plan_next(self, began_ns: int, *, is_early: bool) -> None:
        """Set when the next publication is due, after one that is complete."""
        ended_ns = monotonic_ns()
        self._publication_due_ns = ended_ns + min(max(INTERVAL_NS, PAUSE_FACTOR * (ended_ns - began_ns)), MOST_NS)
        if is_early:
            _early.due_ns = ended_ns + EARLY_PAUSE_FACTOR * (ended_ns - began_ns)
        self._heartbeat.due_ns = min(self._publication_due_ns, ended_ns + MEASURE_AFTER_NS)

    def _postpone(self, page: Page, sources: _FigureSources, began_ns: int) -> None:
        """Publish the labels of the loader now, and its figures later."""
        if not self._publication_due_ns:
            self._publication_due_ns = began_ns + INTERVAL_NS
            known = {"epoch": sources.progress.cursor.epoch, "length": sources.length}
            live = {"ahead": self._queue.ahead, "status_fd": -1, "history": []}
            page.publish({"time_s": time(), **self.identity, **known, **live}, _no_figures(tuple(known)))
        self._heartbeat.due_ns = self._publication_due_ns

    def _begin_measurements(self, began_ns: int) -> None:
        """Begin to count other programs, and request the measurement of sending.

        A loop without worker processes measures the sending of a batch once, if it lasts long enough.
        """
        self._machine.begin_others()
        sources = self._sources
        if (
            sources is not None
            and sources.is_pageable
            and self.sending.is_due(began_ns)
            and not sources.pools.pool_statistics().pids
        ):
            self._heartbeat.inspect = self._measure_sending
        self._heartbeat.due_ns = self._publication_due_ns

    def _measure_sending(self, batch: Any) -> None:
        assert self._sources is not None
        self.sending.measure(batch, monotonic_ns(), collated=self._sources.collated)

    def _update_verdict(self, now_ns: int) -> None:
        """Update the verdict, which takes longer than the figures."""
        batches = self._heartbeat.page.words[BATCHES]
        if now_ns < self._advice_due_ns or not batches:
            return
        self._judged_few = batches < FEW_BATCHES
        loader = self._loader()
        if loader is None:  # no `or`: a loader without batches is false
            loader = self._arguments
        try:
            assert self._sources is not None
            self.verdict = verdict_figures(verdict_of(loader, self, self._sources.pools, quick=True))
        except Exception:  # noqa: BLE001 - the loop continues, whatever is wrong with its diagnosis
            self.verdict, self._advice_due_ns = {}, NEVER_NS
            _log.warning("feedline cannot diagnose this loop; please report this error", exc_info=True)
            return
        ended_ns = monotonic_ns()
        # The verdict on a first batch has nothing to replay: the next one will take longer.
        self._advice_due_ns = ended_ns + verdict_pause_ns(ended_ns - now_ns, self._verdict_ns)
        self._verdict_ns = max(ended_ns - now_ns, self._verdict_ns // 2)

    def _with_addresses(self, stats: Stats) -> tuple[SlowBatch, ...]:
        """The slowest batches, with the address of the first sample."""
        return tuple(replace(batch, address=self._address(batch)) for batch in stats.slowest)

    def _address(self, batch: SlowBatch) -> str:
        address = declared(self._sources and self._sources.dataset, "address")
        indices = plain_indices(batch.indices, 1)
        if address is None or not indices:
            return ""
        index = indices[0]
        if index not in self._addresses:
            try:
                found = address(index)
                self._addresses[index] = " of ".join(map(str, found[::-1])) if isinstance(found, tuple) else str(found)
            except Exception as error:  # noqa: BLE001 - an error of the user's `address`: a label is not worth it
                self._addresses[index] = f"unknown: address({index!r}) raised {type(error).__name__}: {error}"
        return self._addresses[index]


@cache
def _warn_of_figures() -> None:
    _log.warning("feedline cannot publish the figures of this loop; please report this error", exc_info=True)


@cache
def _no_figures(known: tuple[str, ...]) -> str:
    """Figures before the first batch as JSON, without those that are `known`."""
    figures = {name: value for name, value in figures_of(Stats(since_epoch=Stats())).items() if name not in known}
    return as_json({**figures, "verdict": {}})


def _length(plan: Plan) -> int | None:
    try:
        return plan.length()
    except Exception:  # noqa: BLE001 - a sampler without a length, or a broken one: `len(loader)` raises its error
        return None


def _has_unwritten_resume(former: _FigureSources | None) -> bool:
    return former is not None and former.progress.audit is not None and former.progress.audit.unwritten_resume


def _position(sources: _FigureSources) -> int:
    """Batches of the epoch that the loop has received."""
    progress = sources.progress
    if progress.is_over and sources.length:
        return sources.length
    return sources.plan.delivered(progress.cursor)


def _workers_of_all() -> list[ProcessStat]:
    """Worker processes of all loaders of this process."""
    return [
        stat
        for monitor in monitors()
        if monitor._sources is not None
        for stat in monitor._machine.workers(monitor._sources.pools.pool_statistics().pids)
    ]


_monitors: weakref.WeakValueDictionary[str, Monitor] = weakref.WeakValueDictionary()


@dataclass(slots=True)
class EndedLoaders:
    """Sums of loaders that no longer exist, by label."""

    are_kept: bool = False
    """True once metrics are read: a loader that is made again for each epoch would restart its counters."""
    stats: dict[str, Stats] = field(default_factory=dict)

    def add(self, label: str, totals: Totals) -> None:
        """Add the sums of a loader, if they are kept."""
        if self.are_kept:
            stats = totals.stats()
            self.stats[label] = stats.plus_loop(self.stats[label]) if label in self.stats else stats


ended = EndedLoaders()


def monitors() -> list[Monitor]:
    """The monitors of all loaders of this process, by label.

    A loader has one from its first iteration on.
    """
    return [monitor for _, monitor in sorted(_monitors.items())]


def _register(monitor: Monitor, name: str) -> str:
    """Register a monitor by a label that no other loader has.

    The label is the name of the dataset, with a number from the second loader on.
    """
    label = next(
        label for label in chain([name], (f"{name}-{number}" for number in count(2))) if label not in _monitors
    )
    _monitors[label] = monitor
    weakref.finalize(monitor, ended.add, label, monitor.whole).atexit = False
    return label


_SHOWN = 60
"""Points of the history that a page shows."""


def _point(figures: Mapping[str, Any]) -> HistoryPoint:
    return HistoryPoint(*(figures[name] for name in HistoryPoint._fields))
