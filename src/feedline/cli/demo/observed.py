"""torch's own loader, observed: the stages inside its workers are timed with feedline's spans, and judged alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, default_collate

from feedline.cpus import usable_cpus
from feedline.diagnose import Context, Stats, Totals
from feedline.telemetry import Span, Timed, recording, span, work_as

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from feedline.cli.demo.pictures import Sample
    from feedline.cli.demo.training import Batch


class Probe(Dataset[Any]):
    """A dataset and its collate function in one: they do what torch does, and send the times along with the batch."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = dataset
        self.fetched: list[Timed] = []

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """The samples, fetched one by one as torch does it."""
        with recording() as self.fetched, span("fetch"):
            return [self.dataset[index] for index in indices]

    def collate(self, samples: list[Sample]) -> tuple[Batch, list[Timed]]:
        """The batch that torch's default makes, and the spans of its making."""
        with recording() as collated, span("collate"):
            batch: Batch = default_collate(samples)
        return batch, self.fetched + collated


class Observed:
    """torch's DataLoader over a probe: an iterable of plain batches that keeps what the probe timed."""

    def __init__(self, dataset: Dataset[Sample], **arguments: Any) -> None:
        probe = Probe(dataset)
        self.loader = DataLoader(probe, collate_fn=probe.collate, worker_init_fn=work_as, **arguments)
        self.spans: list[list[Timed]] = []

    def __iter__(self) -> Iterator[Batch]:
        for batch, spans in self.loader:
            self.spans.append(spans)
            yield batch

    def stats(self, loop: Sequence[Span], batch_size: int) -> Stats:
        """The figures that feedline would have, out of the loop's alternating waits and steps."""
        totals = Totals()
        before = [loop[0]._replace(stage="step"), *loop[1::2]]  # the step before each wait; none before the first
        for step, wait, made in zip(before, loop[::2], self.spans, strict=False):
            totals.add([step, wait, *made], batch_size)
        return totals.stats()

    def context(self) -> Context:
        """How torch's loader was set up, in feedline's words."""
        workers = self.loader.num_workers
        return Context(
            dataset="Pictures",
            method="process" if workers else "inline",
            num_workers=workers,
            prefetch_factor=self.loader.prefetch_factor or 0,
            cpus=usable_cpus(),
        )
