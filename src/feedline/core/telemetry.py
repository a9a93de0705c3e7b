"""Timed stages of a batch.

Spans are recorded where the work happens, and travel with the batch.
"""

from __future__ import annotations

import threading
from time import monotonic_ns
from typing import NamedTuple

import torch.utils.data._utils.worker as torch_worker

MAIN = -1
"""`worker` of a span recorded in the training process."""


class Span(NamedTuple):
    """One timed stage of one batch.

    Times are of CLOCK_MONOTONIC: comparable between all processes of a machine since its boot.
    """

    stage: str
    start_ns: int
    stop_ns: int
    worker: int = MAIN


SpanTuple = tuple[str, int, int, int]
"""A span without field names.

Every batch creates a few, and a plain tuple costs a fifth.
"""


def spent(stage: str, start_ns: int, stop_ns: int) -> SpanTuple:
    """A span of this thread, from `start_ns` to `stop_ns`."""
    return (stage, start_ns, stop_ns, _current.worker)


class _Current(threading.local):
    spans: list[SpanTuple] | None = None
    worker: int = MAIN


_current = _Current()


class recording:  # noqa: N801 - reads as a verb in a `with` statement
    """`with recording() as spans:` collects the spans of this thread."""

    __slots__ = ("_outer",)

    def __enter__(self) -> list[SpanTuple]:
        self._outer = _current.spans
        spans: list[SpanTuple] = []
        _current.spans = spans
        return spans

    def __exit__(self, *_: object) -> None:
        _current.spans = self._outer


def work_as(worker: int) -> None:
    """Assign the further spans of this thread to `worker`."""
    _current.worker = worker


def is_thread() -> bool:
    """True in a worker that is a thread of the training process."""
    return _current.worker != MAIN and torch_worker._worker_info is None


class span:  # noqa: N801 - reads as a verb in a `with` statement
    """`with span("decode"):` times its block.

    Outside `recording()` it costs two clock reads and keeps nothing.
    """

    __slots__ = ("stage", "start_ns")

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __enter__(self) -> None:
        self.start_ns = monotonic_ns()

    def __exit__(self, *_: object) -> None:
        spans = _current.spans
        if spans is not None:
            spans.append(Span(self.stage, self.start_ns, monotonic_ns(), _current.worker))
