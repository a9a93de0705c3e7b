"""Results of batch requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from feedline.core.cursor import PartitionOffset
from feedline.core.telemetry import SpanTuple


class _EmptyBatch:
    """The type of `EMPTY_BATCH`: the batch of a request without samples.

    Every sample was skipped, or the partition has ended.
    """

    def __reduce__(self) -> str:
        return "EMPTY_BATCH"  # unpickles as the same instance, so that `is` works everywhere


EMPTY_BATCH = _EmptyBatch()


class SkippedSample(NamedTuple):
    """A failed sample: left out, or replaced by the sample at `replaced_by`."""

    epoch: int
    position: int
    index: Any
    error: str
    replaced_by: Any = None
    content: str | None = None
    """The message in base64, if it came from a live stream."""


class Padding(NamedTuple):
    """Places of a padded batch."""

    padded: int
    places: int
    """All places, the padded ones included."""
    uneven: int
    """Padded places that a batch of equally long samples would not have: those up to its longest sample."""


class BatchResult(NamedTuple):
    """A batch, with its spans, skipped samples and dataset offset."""

    batch: Any
    spans: list[SpanTuple]
    skipped: tuple[SkippedSample, ...] = ()
    mark: PartitionOffset | None = None
    digest: str | None = None
    store_counts: Mapping[str, float] | None = None
    """Store metrics of the worker process since its last batch."""
    worker_state: bytes | None = None
    """Result of the builder's `capture()` in the worker after this batch; None if it is not reported."""
    padding: Padding | None = None
    """None if it is unknown."""
    rows: Sequence[int] | None = None
    """Numbers of the samples in their partition; None for map-style datasets."""


def new_result(
    batch: Any,
    spans: list[SpanTuple],
    skipped: tuple[SkippedSample, ...] = (),
    mark: PartitionOffset | None = None,
    digest: str | None = None,
    rows: Sequence[int] | None = None,
) -> BatchResult:
    """The result of a batch in this process.

    The constructor of tuple takes a third of the time of the named tuple's constructor.
    """
    return tuple.__new__(BatchResult, (batch, spans, skipped, mark, digest, None, None, None, rows))
