"""Monitor of a loader: its statistics over all epochs, and their publication.

The loop's own thread publishes, between two batches; there is no thread for it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from time import monotonic, monotonic_ns, time
from typing import Any

from feedline.core import store_metrics
from feedline.core.cgroups import Cgroup
from feedline.core.page import BATCHES, SINCE, Page
from feedline.core.store_metrics import StoreStatistics
from feedline.errors import ArgumentError
from feedline.loader.identity import identity_of, log_path
from feedline.loader.loop import Progress
from feedline.loader.padding import padding_share
from feedline.loader.plan import Plan
from feedline.loader.pools import LoaderPools
from feedline.loader.pulse import NEVER_NS, Pulse, QueueState
from feedline.loader.report import Stats, Totals, Verdict
from feedline.loader.report.figures import figures_of, plain_indices, verdict_figures
from feedline.loader.report.history import History, HistoryPoint
from feedline.loader.report.page_html import RankReport
from feedline.loader.report.page_html import page as page_text
from feedline.loader.report.run_log import RunLog, path_of_rank
from feedline.loader.report.stats import SlowBatch
from feedline.loader.resources import resident_nbytes

_log = logging.getLogger("feedline")


INTERVAL_NS = 250_000_000
"""Least time between two publications."""


SHARE = 500
"""A publication takes at most this part of the time: after a slow one, the next comes later."""


MOST_NS = 2_000_000_000
"""Most time between two publications of a loop that receives batches: the first one of a process may be very slow."""


_MACHINE_S = 1.0
"""Age up to which figures of the machine are used again: each costs a system call per worker."""


_VERDICT_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class _Machine:
    """Figures that the system is asked for."""

    read_s: float = -1e9
    pids: tuple[int, ...] = ()
    worker_nbytes: int = 0
    throttled_share: float | None = None


@dataclass(slots=True)
class _Padding:
    """Sums over the batches that were looked at."""

    batches: int = 0
    total: float = 0.0

    def add(self, batch: Any) -> None:
        try:
            share = padding_share(batch)
        except Exception:  # noqa: BLE001 - a batch of a type of the user's: this figure is not worth its error
            return
        if share is not None:
            self.batches, self.total = self.batches + 1, self.total + share

    @property
    def share(self) -> float | None:
        return self.total / self.batches if self.batches else None


@dataclass(slots=True)
class _Sources:
    """The parts of a loader that have figures."""

    pools: LoaderPools
    progress: Progress
    plan: Plan
    dataset: Any
    length: int | None


class Monitor:
    """Statistics of one loader, its page, history and run log.

    `stats` may be called by any thread, and never waits for a batch. Everything else belongs to the thread of the loop.
    """

    def __init__(self, verdict: Callable[[], Callable[[], Verdict] | None]) -> None:
        self.whole = Totals()
        self.history = History()
        self.identity: dict[str, Any] = {}
        self._verdict = verdict
        self._log: RunLog | None = None
        self._sources: _Sources | None = None
        self._pulse = Pulse()
        self._queue = QueueState()
        self._machine = _Machine()
        self._group: Cgroup | None = None
        self._stores_before: StoreStatistics | None = None
        self._memory: list[tuple[int, int]] = []
        self._padding = _Padding()
        self._addresses: dict[Any, str] = {}
        self.verdict: dict[str, Any] = {}
        self._advice_due_ns = monotonic_ns() + _VERDICT_NS  # a loader of a few seconds ends before anything reads it
        self._page: Page | None = None
        self._owner = 0

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
        self._sources = _Sources(pools, progress, plan, loader.dataset, _length(plan))
        progress.totals = Totals(whole=self.whole)
        page = self._opened()
        page.words[BATCHES] = self.whole.batches
        progress.pulse = self._pulse = Pulse(page, due_ns=0, publish=self._publish_weakly())

    def stats(self) -> Stats:
        """The figures so far."""
        sources = self._sources
        if sources is None:
            return Stats()
        progress, pools = sources.progress, sources.pools
        machine = self._read_machine(sources)
        common: dict[str, Any] = {
            "epoch": progress.cursor.epoch - progress.over,
            "position": sources.length if progress.over and sources.length else sources.plan.delivered(progress.cursor),
            "length": sources.length,
            "ready": self._queue.ready,
            "in_flight": self._queue.in_flight,
            "worker_nbytes": machine.worker_nbytes,
            "worker_growth_nbytes": self._growth(),
            "padding_share": self._padding.share,
            "throttled_share": machine.throttled_share,
        }
        stores = store_metrics.statistics()
        epoch = replace(progress.totals.stats(), stores=stores.since(progress.stores_before), **common)
        epoch = pools.complete(epoch, progress.quarantine.this_epoch, since_epoch=True)
        whole = replace(self.whole.stats(), stores=stores.since(self._stores_before or StoreStatistics()), **common)
        whole = pools.complete(whole, progress.quarantine.count)
        return replace(
            whole, slowest=self._addressed(whole), since_epoch=replace(epoch, slowest=self._addressed(epoch))
        )

    def waiting_s(self) -> float:
        """Seconds of the current wait; 0 if the loop does not wait."""
        since_ns = self._pulse.page.words[SINCE]
        return max(0.0, (monotonic_ns() + since_ns) / 1e9) if since_ns < 0 else 0.0

    def figures(self) -> dict[str, Any]:
        """The statistics as JSON values, with what identifies the loader."""
        return {
            "time_s": time(),
            **self.identity,
            **figures_of(self.stats()),
            "verdict": self.verdict,
        }

    def write_page(self, path: str | os.PathLike[str], verdict: Verdict) -> None:
        """Write the report page; ArgumentError before the first iteration."""
        if self._sources is None:
            raise ArgumentError("there is nothing to report yet: iterate over the loader first")
        self.verdict = verdict_figures(verdict)
        figures = self.figures()
        points = [*self.history.points, _point(figures)]
        batches = self._sources.progress.totals.recent_batches()
        report = RankReport(figures, [point._asdict() for point in points], batches)
        Path(path).write_text(page_text([report]), encoding="utf-8")

    def close(self) -> None:
        """Close the page; a later iteration opens another one."""
        page, self._page = self._page, None
        if page is not None:
            page.close()

    def _opened(self) -> Page:
        # A forked process has its parent's page, too, and must not write to it.
        if self._page is None or self._owner != os.getpid():
            self._page, self._owner = Page(), os.getpid()
        return self._page

    def _publish_weakly(self) -> Callable[..., None]:
        method = weakref.WeakMethod(self._publish)  # an iteration that is kept must not keep the page open

        def publish(queue: Callable[[], QueueState], *, epoch_ends: bool = False) -> None:
            bound = method()
            if bound is not None:
                bound(queue, epoch_ends=epoch_ends)

        return publish

    def _publish(self, queue: Callable[[], QueueState], *, epoch_ends: bool) -> None:
        began_ns = monotonic_ns()
        self._pulse.due_ns = NEVER_NS  # an error below must not come again with each batch
        self._queue = queue()
        sources = self._sources
        if sources is None or self._page is None:
            return
        statistics = sources.pools.pool_statistics()
        if epoch_ends and statistics.pids:
            self._memory.append((sources.progress.cursor.epoch, resident_nbytes(statistics.pids)))
        self._judge(began_ns)
        figures = self.figures()
        now_s = figures["time_s"]
        if epoch_ends or self.history.is_due(now_s):
            self.history.add(_point(figures))
        if self._log is not None:
            self._log.write(figures, epoch_ends=epoch_ends)
        recent = self.history.points[-_SHOWN:]
        live = {"ahead": self._queue.ahead, "status_fd": statistics.status_fd, "history": recent}
        self._page.publish({**figures, **live})
        self._pulse.inspect = self._padding.add
        ended_ns = monotonic_ns()
        self._pulse.due_ns = ended_ns + min(max(INTERVAL_NS, SHARE * (ended_ns - began_ns)), MOST_NS)

    def _judge(self, now_ns: int) -> None:
        """Renew the verdict, which takes longer than the figures."""
        if now_ns < self._advice_due_ns or not self._pulse.page.words[BATCHES]:
            return
        verdict = self._verdict()
        try:
            self.verdict = {} if verdict is None else verdict_figures(verdict())
        except Exception:  # noqa: BLE001 - the loop goes on, whatever is wrong with its diagnosis
            self.verdict, self._advice_due_ns = {}, NEVER_NS
            _log.warning("feedline cannot diagnose this loop; please report this error", exc_info=True)
            return
        ended_ns = monotonic_ns()
        self._advice_due_ns = ended_ns + min(max(_VERDICT_NS, SHARE * (ended_ns - now_ns)), 30 * _VERDICT_NS)

    def _read_machine(self, sources: _Sources) -> _Machine:
        machine, now_s = self._machine, monotonic()
        pids = sources.pools.pool_statistics().pids
        if now_s - machine.read_s < _MACHINE_S and pids == machine.pids:
            return machine
        if self._group is None:
            self._group = Cgroup.of_process()
        throttling = self._group.throttling()
        self._machine = _Machine(now_s, pids, resident_nbytes(pids), None if throttling is None else throttling.share)
        return self._machine

    def _growth(self) -> float | None:
        """Bytes per epoch, between the ends of two epochs.

        The first epoch is left out as soon as possible: workers load libraries in it.
        """
        memory = self._memory[1:] if len(self._memory) > 2 else self._memory
        if len(memory) < 2:
            return None
        (first, before), (last, after) = memory[0], memory[-1]
        return (after - before) / max(last - first, 1)

    def _addressed(self, stats: Stats) -> tuple[SlowBatch, ...]:
        """The slowest batches, with the address of the first sample."""
        return tuple(replace(batch, address=self._address(batch)) for batch in stats.slowest)

    def _address(self, batch: SlowBatch) -> str:
        address = getattr(self._sources and self._sources.dataset, "address", None)
        indices = plain_indices(batch.indices, 1)
        if address is None or not indices:
            return ""
        index = indices[0]
        if index not in self._addresses:
            try:
                self._addresses[index] = str(address(index))
            except Exception as error:  # noqa: BLE001 - a dataset of the user's; its samples matter more
                self._addresses[index] = f"unknown: address({index!r}) raised {type(error).__name__}: {error}"
        return self._addresses[index]


def _length(plan: Plan) -> int | None:
    try:
        return plan.length()
    except Exception:  # noqa: BLE001 - a sampler without a length, or a broken one: `len(loader)` raises its error
        return None


_monitors: weakref.WeakValueDictionary[str, Monitor] = weakref.WeakValueDictionary()


def monitors() -> list[Monitor]:
    """The monitors of all loaders of this process, by label.

    A loader has one from its first iteration on.
    """
    return [monitor for _, monitor in sorted(_monitors.items())]


def _register(monitor: Monitor, name: str) -> str:
    """A label that no other loader has.

    It is the name of the dataset, with a number from the second loader on.
    """
    label = next(
        label for label in chain([name], (f"{name}-{number}" for number in count(2))) if label not in _monitors
    )
    _monitors[label] = monitor
    return label


_SHOWN = 60
"""Points of the history that a page shows."""


def _point(figures: Mapping[str, Any]) -> HistoryPoint:
    return HistoryPoint(*(figures[name] for name in HistoryPoint._fields))
