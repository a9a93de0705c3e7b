"""Spans as a Chrome trace: for chrome://tracing and Perfetto."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from feedline.telemetry import MAIN, Span


def trace_events(spans: Iterable[Span], *, process: int = 0) -> list[dict[str, Any]]:
    """Trace events, to be written as JSON: one row per worker, one block per span, microseconds since boot.

    `process` groups the rows: give each rank its own number to lay their traces side by side.
    """
    spans = list(spans)
    workers = sorted({span.worker for span in spans})
    return [_named(worker, process) for worker in workers] + [_block(span, process) for span in spans]


def _named(worker: int, process: int) -> dict[str, Any]:
    name = "training loop" if worker == MAIN else f"worker {worker}"
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": worker + 1, "args": {"name": name}}


def _block(span: Span, process: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.stage,
        "cat": "feedline",
        "pid": process,
        "tid": span.worker + 1,
        "ts": span.start_ns / 1e3,
        "dur": (span.stop_ns - span.start_ns) / 1e3,
    }
