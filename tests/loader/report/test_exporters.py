"""Numbers in words, Chrome traces, Prometheus' text, and profiler ranges."""

from __future__ import annotations

import json

import pytest

from feedline.core.telemetry import Span
from feedline.loader.report import StageTimes, Stats, stats
from feedline.loader.report.exporters import exposition, trace_events


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72.4, "72 s"),
        (1.25, "1.2 s"),
        (0.9996, "1.0 s"),
        (0.08, "80 ms"),
        (0.0051, "5.1 ms"),
        (0.00099996, "1.0 ms"),
        (0.00035, "350 µs"),
        (0.0000012, "1.2 µs"),
        (1e-9, "under 1 µs"),
        (0, "0 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert stats.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 %"), (0.012, "1.2 %"), (0.0996, "10 %"), (0.62, "62 %"), (1, "100 %")]
)
def test_share(value: float, text: str) -> None:
    assert stats.share(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12 bytes"), (1536, "1.5 KiB"), (38 << 20, "38 MiB"), (3 << 30, "3.0 GiB")]
)
def test_size(value: float, text: str) -> None:
    assert stats.size(value) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "worker", "no worker"), (1, "batch", "1 batch"), (1200, "batch", "1,200 batches"), (2, "worker", "2 workers")],
)
def test_count(number: int, noun: str, text: str) -> None:
    assert stats.count(number, noun) == text


def test_a_trace_has_one_row_per_worker_and_one_block_per_span() -> None:
    events = trace_events([Span("fetch", 1_000_000, 3_500_000, 0), Span("wait", 2_000_000, 4_000_000)], process=3)
    assert json.loads(json.dumps(events)) == [
        {"ph": "M", "name": "thread_name", "pid": 3, "tid": 0, "args": {"name": "training loop"}},
        {"ph": "M", "name": "thread_name", "pid": 3, "tid": 1, "args": {"name": "worker 0"}},
        {"ph": "X", "name": "fetch", "cat": "feedline", "pid": 3, "tid": 1, "ts": 1000.0, "dur": 2500.0},
        {"ph": "X", "name": "wait", "cat": "feedline", "pid": 3, "tid": 0, "ts": 2000.0, "dur": 2000.0},
    ]


def test_no_spans_no_trace() -> None:
    assert trace_events([]) == []


STATS = Stats(
    batches=3,
    samples=96,
    wait_s=0.5,
    stages={"fetch": StageTimes(3, 1.5, 0.5, 0.6, (0,)), 'od"d\\': StageTimes(1, 2.0, 2.0, 2.0, (0,))},
)


def test_every_metric_has_its_type_once_and_before_its_samples() -> None:
    lines = exposition(STATS).splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    names = [line.split("{")[0].split()[0] for line in lines if not line.startswith("#")]
    assert len(set(types)) == len(types)
    assert sorted(set(names)) == sorted(types)
    assert exposition(STATS).endswith("\n")


def test_values_and_labels() -> None:
    text = exposition(STATS, {"rank": "0", "name": 'a "b"\n'})
    assert 'feedline_batches_total{rank="0",name="a \\"b\\"\\n"} 3\n' in text
    assert 'feedline_stage_seconds_total{rank="0",name="a \\"b\\"\\n",stage="fetch"} 1.5\n' in text
    assert 'stage="od\\"d\\\\"} 2.0\n' in text


def test_without_labels() -> None:
    assert "\nfeedline_wait_seconds_total 0.5\n" in exposition(STATS)
    assert 'feedline_stage_seconds_total{stage="fetch"} 1.5\n' in exposition(STATS)
