"""Results of batch requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from feedline.core.cursor import PartitionOffset
from feedline.core.telemetry import SpanTuple


class _EmptyBatch:
    """The batch of a request of which nothing is left: every sample was skipped, or its partition has ended."""

    def __reduce__(self) -> str:
        return "EMPTY_BATCH"


EMPTY_BATCH = _EmptyBatch()


class SkippedSample(NamedTuple):
    """A sample that failed and was left out, or replaced by the one at `replaced_by`."""

    epoch: int
    position: int
    index: Any
    error: str
    replaced_by: Any = None


class BatchResult(NamedTuple):
    """A batch and what is known of how it came about."""

    batch: Any
    spans: list[SpanTuple]
    skipped: tuple[SkippedSample, ...] = ()
    mark: PartitionOffset | None = None
    digest: str | None = None
    store_counts: Mapping[str, float] | None = None
    """What the stores of a worker process did meanwhile."""
