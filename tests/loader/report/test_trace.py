"""Chrome traces: rows, blocks, arrows and counters."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import feedline as fl
from feedline.core.telemetry import MAIN, Span
from feedline.loader.report.totals import RecentBatch
from feedline.loader.report.trace import chrome_trace
from feedline.stores.base import ByteRange
from feedline.stores.requests import Transfers

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
    """The events of a kind; times count from the first block."""
    everything = json.loads(json.dumps(trace))["traceEvents"]
    first = min((event["ts"] for event in everything if event["ph"] == "X"), default=0)
    found = [event for event in everything if event["ph"] == kind]
    return [{**event, "ts": event["ts"] - first} if "ts" in event else event for event in found]


def test_spans_are_blocks_in_rows_of_the_rank() -> None:
    trace = chrome_trace([BATCH], {"rank": 3, "loader": "Photos"})
    where = {"cat": "feedline", "pid": 3, "args": {"batch": 7, "epoch": 1}}
    assert events("X", trace) == [
        {"ph": "X", "name": "fetch", "tid": 2, "ts": 0, "dur": 2000.0, **where},
        {"ph": "X", "name": "sample", "tid": 1, "ts": 0, "dur": 1000.0, **where},
        {"ph": "X", "name": "wait", "tid": 0, "ts": 1000, "dur": 2000.0, **where},
    ]
    names = {(event["name"], event.get("tid")): event["args"] for event in events("M", trace)}
    assert names["process_name", None] == {"name": "feedline Photos, rank 3"}
    rows = [names["thread_name", row]["name"] for row in range(3)]
    assert rows == ["training loop", "sampler", "worker 0"]


def test_an_arrow_leads_from_the_worker_to_the_wait() -> None:
    (start,), (finish,) = (events(kind, chrome_trace([BATCH])) for kind in "sf")
    assert start["id"] == finish["id"]
    assert (start["tid"], finish["tid"], finish["bp"]) == (2, 0, "e")
    assert 0 <= start["ts"] <= 2000 <= finish["ts"] <= 3000


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
        assert any(b["tid"] == arrow["tid"] and 0 <= arrow["ts"] - b["ts"] <= b["dur"] for b in blocks)
    ready = [event["args"]["ready"] for event in events("C", trace)]
    assert ready[-1] == 0
    assert max(ready) >= 1
    rows = defaultdict(list)
    for block in trace["traceEvents"]:
        if block["ph"] == "X":
            rows[block["tid"]].append((block["ts"], block["ts"] + block["dur"]))
            # Viewers count in whole nanoseconds.
            assert all((1000 * time).is_integer() for time in (block["ts"], block["dur"]))
    for spans in rows.values():  # blocks of a row follow each other or nest; viewers drop any other, by one nanosecond
        assert not any(a < c < b < d for a, b in spans for c, d in spans)


def test_names_are_written_without_escapes(tmp_path: Path) -> None:
    """Perfetto shows an escape as it is."""
    named = type("Größen", (TensorDataset,), {})
    loader = fl.DataLoader(named(torch.arange(4)), 2)
    list(loader)
    loader.trace(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert "feedline Größen, rank 0" in text
    assert json.loads(text)["otherData"]["loader"] == "Größen"


def test_the_trace_has_the_clock_of_torchs_profiler_and_its_ranges(tmp_path: Path) -> None:
    loader = fl.DataLoader(TensorDataset(torch.arange(8)), 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        list(loader)
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    loader.trace(tmp_path / "feedline.json")
    theirs, ours = (json.loads((tmp_path / name).read_text()) for name in ("torch.json", "feedline.json"))
    assert theirs["baseTimeNanoseconds"] == ours["baseTimeNanoseconds"]
    calls = [e for e in theirs["traceEvents"] if e.get("name") == "enumerate(DataLoader)#feedline.__next__"]
    waits = [e for e in ours["traceEvents"] if e["name"] == "wait"]
    for call, wait in zip(calls, waits, strict=False):  # the clocks of a machine drift apart by less
        assert -1000 < wait["ts"] - call["ts"] < call["dur"]
    assert {"feedline.sample", "feedline.receive"} <= {event.get("name") for event in theirs["traceEvents"]}


class Remote(Dataset[int]):
    transfers = Transfers(2, None)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        (view,) = self.transfers.run(lambda flight: memoryview(bytes(flight.span.nbytes)), [ByteRange(0, index + 1)])
        return len(view)


def test_reads_of_a_store_are_within_the_fetch_of_their_batch(tmp_path: Path) -> None:
    loader = fl.DataLoader(Remote(), batch_size=2)
    assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4]]
    loader.trace(tmp_path / "trace.json")
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    reads, fetches = ([event for event in events if event["name"] == name] for name in ("read a store", "fetch"))
    assert reads[0]["args"]["batch"] == 0
    for read in reads:
        (fetch,) = (each for each in fetches if each["args"] == read["args"])
        assert fetch["tid"] == read["tid"]
        assert fetch["ts"] <= read["ts"]
        assert read["ts"] + read["dur"] <= fetch["ts"] + fetch["dur"]
    assert loader.stats().stages["read a store"].count >= 1
