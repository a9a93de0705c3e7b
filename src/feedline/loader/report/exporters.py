"""Exporters: `Stats` as Prometheus text, spans as a Chrome trace.

The trace is read by chrome://tracing and Perfetto.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from feedline.core.telemetry import MAIN, Span
from feedline.loader.report.stats import Stats, is_wall


class _Metric(NamedTuple):
    name: str
    kind: str
    help: str
    value: float


def exposition(stats: Stats, labels: Mapping[str, str] | None = None) -> str:
    """The metrics of one loader, with `labels` on each sample.

    Labels are, for example, the rank and the loader's name.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats (text format 0.0.4).
    """
    labels = labels or {}
    lines = [line for metric in _metrics(stats) for line in _lines(metric, labels)]
    lines += _head("feedline_stage_seconds_total", "counter", "Time spent in each stage, summed over workers.")
    lines += [
        _sample("feedline_stage_seconds_total", {**labels, "stage": stage}, times.total_s)
        for stage, times in stats.stages.items()
    ]
    return "\n".join(lines) + "\n"


def _metrics(stats: Stats) -> Iterable[_Metric]:
    return (
        _Metric("feedline_batches_total", "counter", "Batches received by the loop.", stats.batches),
        _Metric("feedline_samples_total", "counter", "Samples received by the loop.", stats.samples),
        _Metric("feedline_wait_seconds_total", "counter", "Time the loop waited for batches.", stats.wait_s),
        _Metric("feedline_step_seconds_total", "counter", "Time the loop took between batches.", stats.step_s),
        _Metric("feedline_restarts_total", "counter", "Workers that died and were replaced.", stats.restarts),
        _Metric("feedline_skipped_total", "counter", "Samples left out or replaced after an error.", stats.skipped),
        _Metric("feedline_workers", "gauge", "Live workers.", stats.workers),
        _Metric(
            "feedline_in_flight_bytes",
            "gauge",
            "Bytes of batches in flight or held by the loop.",
            stats.in_flight_nbytes,
        ),
        _Metric("feedline_arena_bytes", "gauge", "Bytes of transport memory of the workers.", stats.arena_nbytes),
    )


def _lines(metric: _Metric, labels: Mapping[str, str]) -> list[str]:
    return [*_head(metric.name, metric.kind, metric.help), _sample(metric.name, labels, metric.value)]


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def trace_events(spans: Iterable[Span], *, process: int = 0) -> list[dict[str, Any]]:
    """Chrome trace events: a row per worker, a block per span.

    The events are JSON values; times are microseconds since boot. `process` groups the rows: with the rank as its
    value, traces of several ranks can be merged.
    """
    spans = [span for span in spans if is_wall(span.stage)]
    workers = sorted({span.worker for span in spans})
    return [_row_name(worker, process) for worker in workers] + [_block(span, process) for span in spans]


def _row_name(worker: int, process: int) -> dict[str, Any]:
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
