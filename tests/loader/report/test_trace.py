"""Chrome traces: rows, blocks, arrows and counters."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import feedline as fl
from feedline.core.telemetry import MAIN, Span
from feedline.loader.report.totals import RecentBatch
from feedline.loader.report.trace import chrome_trace

MS = 1_000_000
BATCH = RecentBatch(
    [
        Span("fetch", 1 * MS, 3 * MS, 0),
        Span("fetch.cpu", 7, 9, 0),
        Span("sample", 1 * MS, 2 * MS, MAIN),
        Span("wait", 2 * MS, 4 * MS, MAIN),
    ],
    epoch=1,
    number=7,
)


def events(kind: str, trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in json.loads(json.dumps(trace))["traceEvents"] if event["ph"] == kind]


def test_spans_are_blocks_in_rows_of_the_rank() -> None:
    trace = chrome_trace([BATCH], {"rank": 3, "loader": "Photos"})
    where = {"cat": "feedline", "pid": 3, "args": {"batch": 7, "epoch": 1}}
    assert events("X", trace) == [
        {"ph": "X", "name": "fetch", "tid": 2, "ts": 1000.0, "dur": 2000.0, **where},
        {"ph": "X", "name": "sample", "tid": 1, "ts": 1000.0, "dur": 1000.0, **where},
        {"ph": "X", "name": "wait", "tid": 0, "ts": 2000.0, "dur": 2000.0, **where},
    ]
    names = {(event["name"], event.get("tid")): event["args"] for event in events("M", trace)}
    assert names["process_name", None] == {"name": "feedline Photos · rank 3"}
    rows = [names["thread_name", row]["name"] for row in range(3)]
    assert rows == ["training loop", "sampler", "worker 0"]


def test_an_arrow_leads_from_the_worker_to_the_wait() -> None:
    (start,), (finish,) = (events(kind, chrome_trace([BATCH])) for kind in "sf")
    assert start["id"] == finish["id"]
    assert (start["tid"], finish["tid"], finish["bp"]) == (2, 0, "e")
    assert 1000 <= start["ts"] < 3000 <= finish["ts"] < 4000


def test_without_workers_there_is_no_arrow_and_no_counter() -> None:
    inline = BATCH._replace(spans=[Span("fetch", 1, 2, MAIN), Span("wait", 1, 3, MAIN)])
    assert {event["ph"] for event in chrome_trace([inline])["traceEvents"]} == {"M", "X"}


def test_no_batches_no_events() -> None:
    assert chrome_trace([])["traceEvents"] == []


@pytest.mark.parametrize("method", ["thread", "process"])
def test_the_trace_of_a_real_loop_is_well_formed(method: str, tmp_path: Path) -> None:
    with fl.DataLoader(TensorDataset(torch.arange(40)), 4, num_workers=2, worker_method=method) as loader:
        for _ in loader:
            pass
        loader.trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    blocks = events("X", trace)
    assert {block["args"]["batch"] for block in blocks} == set(range(10))
    assert len(events("s", trace)) == len(events("f", trace)) == 10
    for arrow in events("s", trace) + events("f", trace):  # an arrow is bound to the block around its time
        assert any(b["tid"] == arrow["tid"] and b["ts"] <= arrow["ts"] <= b["ts"] + b["dur"] for b in blocks)
    ready = [event["args"]["ready"] for event in events("C", trace)]
    assert ready[-1] == 0
    assert max(ready) >= 1
    rows = defaultdict(list)
    for block in blocks:
        rows[block["tid"]].append([round(1000 * time) for time in (block["ts"], block["ts"] + block["dur"])])
    for spans in rows.values():  # blocks of a row follow each other or nest; anything else is refused by viewers
        assert not any(a < c < b < d for a, b in spans for c, d in spans)
