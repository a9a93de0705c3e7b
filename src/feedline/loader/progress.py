"""`Progress`: the batches that the training loop has received."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

from feedline.core import store_metrics
from feedline.core.batch import EMPTY_BATCH, BatchResult
from feedline.core.cursor import Cursor, PartitionCursor
from feedline.loader.checks import DuplicateStreamCheck, LengthCheck
from feedline.loader.error_policy import Quarantine
from feedline.loader.monitoring.heartbeat import Heartbeat
from feedline.loader.plan import Plan
from feedline.loader.report.audit_log import AuditLog
from feedline.loader.report.totals import Totals
from feedline.loader.worker_states import WorkerStates


@dataclass(slots=True)
class Progress:
    """The batches received by the training loop; `advance` records each of them."""

    cursor: Cursor | PartitionCursor
    quarantine: Quarantine
    totals: Totals
    duplicate_check: DuplicateStreamCheck | None = None
    length_check: LengthCheck | None = None
    workers: WorkerStates = field(default_factory=lambda: WorkerStates(0))
    is_over: bool = False
    end: Cursor | PartitionCursor | None = None
    """The cursor at the end of the epoch, once it is over."""
    samples: int | None = None
    """Samples delivered in this epoch; None after a mid-epoch resume, where the count is unknown."""
    stores_before: store_metrics.StoreStatistics = field(default_factory=store_metrics.statistics)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    audit: AuditLog | None = None
    run: int = field(default_factory=count(1).__next__)
    """See `PartitionRequest.run`."""

    @classmethod
    def of(cls, loader: Any, cursor: Cursor | PartitionCursor, plan: Plan, quarantine: Quarantine) -> Self:
        """The progress of a loader's new iteration."""
        monitor = loader._fl_monitor
        duplicate_check = DuplicateStreamCheck(type(loader.dataset).__name__)
        progress = cls(
            cursor, quarantine, Totals(whole=monitor.whole), duplicate_check,
            workers=plan.workers, heartbeat=monitor.new_heartbeat(),
        )  # fmt: skip
        if cursor == plan.start_of(cursor.epoch):
            progress.samples = 0
        length: int | None = loader._IterableDataset_len_called
        if length is not None:
            progress.length_check = LengthCheck(loader.dataset, length, loader.num_workers)
        return progress

    def following(self, cursor: Cursor, quarantine: Quarantine, monitor: Any) -> Progress:
        """The progress of the next epoch, of a map-style dataset."""
        return Progress(
            cursor, quarantine, Totals(whole=monitor.whole), None, None, self.workers,
            samples=0, heartbeat=monitor.new_heartbeat(),
        )  # fmt: skip

    def advance(self, request: Any, result: BatchResult) -> int:
        """Record one batch as delivered and return its number of samples.

        `ErrorLimitError` if too many samples have failed; the cursor then stays before the batch.
        """
        if result.digest is not None and self.duplicate_check is not None:
            self.duplicate_check.add(request.partition, result.digest)
        if self.length_check is not None and result.batch is not EMPTY_BATCH:
            self.length_check.count()
        if result.padding is not None:
            self.totals.add_padding(result.padding)
        if result.store_counts:
            store_metrics.count(**result.store_counts)
        left_out = 0
        if result.skipped:
            self.quarantine.add(result.skipped)
            left_out = sum(skip.replaced_by is None for skip in result.skipped)
        if self.audit is not None:
            self.audit.add(request, self.cursor, result.mark)
        self.cursor, samples = request.advance(self.cursor, result.mark, result.batch is not EMPTY_BATCH)
        if result.worker_state is not None:
            self.workers.add(request.turn, result.worker_state)
        # Marks also count samples that could not be read.
        delivered = int(samples) - left_out if result.rows is None else len(result.rows)
        if self.samples is not None:
            self.samples += delivered
        return delivered

    def end_epoch(self) -> None:
        """Record the end of the epoch; ErrorLimitError if all its samples failed."""
        if self.samples == 0:
            self.quarantine.check_not_empty()
        self.end, self.cursor = self.cursor, self.cursor.next_epoch()
        self.quarantine.end_epoch()
        self.is_over = True
