"""Chrome trace of the latest batches, as Perfetto and speedscope read it.

Times are microseconds, by the clock of torch's profiler, so that both traces can be loaded together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from feedline.core.histogram import LOOP
from feedline.core.telemetry import MAIN, SpanTuple
from feedline.loader.report.stats import is_block
from feedline.loader.report.totals import RecentBatch

_CATEGORY = "feedline"


_SAMPLER = "sampler"


_BASE_NS = 7_889_238 * 10**9
"""Quarter of a year. torch counts from the last multiple of it, because absolute times are too large for a viewer's
numbers.
"""


_GRID_NS = 125
"""Resolution of the trace.

Floats of this size have steps of a nanosecond, and viewers drop a block that ends one nanosecond after its parent.
Multiples of an eighth of a microsecond are exact, also after an addition.
"""


def chrome_trace(batches: Sequence[RecentBatch], identity: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The trace as a JSON value.

    The loop, the sampler and each worker have a row, and each span is a block. Blocks name their batch. An arrow leads
    from the worker that built a batch to the wait of the loop for it. A counter shows how many batches were complete.
    Rows are grouped by rank, so traces of several ranks can be merged.
    """
    identity = identity or {}
    process = int(identity.get("rank", 0))
    events = [*_names(batches, process, identity), *_ready(batches, process)]
    for batch in batches:
        events += _blocks(batch, process)
        events += _arrow(batch, process)
    base_ns = time.time_ns() // _BASE_NS * _BASE_NS
    shift_ns = time.time_ns() - time.monotonic_ns() - base_ns
    for event in events:
        if "ts" in event:
            _place(event, shift_ns)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "otherData": _plain(identity),
    }


def _place(event: dict[str, Any], shift_ns: int) -> None:
    """Turn nanoseconds into the microseconds of the trace, on its grid."""
    start_ns = event["ts"] + shift_ns
    grid_ns = start_ns // _GRID_NS * _GRID_NS
    event["ts"] = grid_ns / 1e3
    if "dur" in event:
        event["dur"] = ((start_ns + event["dur"]) // _GRID_NS * _GRID_NS - grid_ns) / 1e3


def _plain(identity: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in identity.items() if isinstance(value, str | int)}


def _names(batches: Iterable[RecentBatch], process: int, identity: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    rows = {_row(timed) for batch in batches for timed in batch.spans if is_block(timed[0])}
    if not rows:
        return
    # ASCII: Perfetto shows an escape of JSON as it is, and a program that merges traces may write escapes.
    title = f"feedline {identity.get('loader', '')}".rstrip() + f", rank {process}"
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}
    for row in sorted(rows):
        name = {0: "training loop", 1: _SAMPLER}.get(row, f"worker {row - 2}")
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": row, "args": {"sort_index": row}}


def _row(timed: SpanTuple) -> int:
    """Row of a span: 0 is the loop, 1 the sampler."""
    if timed[0] == "sample":
        return 1
    return 0 if timed[3] == MAIN else timed[3] + 2


def _blocks(batch: RecentBatch, process: int) -> Iterator[dict[str, Any]]:
    place = {} if batch.number < 0 else {"batch": batch.number, "epoch": batch.epoch}
    for timed in batch.spans:
        stage, start_ns, stop_ns, _ = timed
        if is_block(stage):
            yield {
                "ph": "X",
                "name": stage,
                "cat": _CATEGORY,
                "pid": process,
                "tid": _row(timed),
                "ts": start_ns,
                "dur": stop_ns - start_ns,
                "args": place,
            }


def _arrow(batch: RecentBatch, process: int) -> list[dict[str, Any]]:
    """Events of the arrow from a worker to the wait.

    Empty if no worker has built the batch.
    """
    built, waited = _last_build_span(batch), _wait(batch)
    if built is None or waited is None or batch.number < 0:
        return []
    arrow = {"name": "batch", "cat": _CATEGORY, "id": batch.epoch << 32 | batch.number, "pid": process}
    # An arrow belongs to the block that is open at its time.
    left, arrived = (max(each[1], each[2] - _GRID_NS) for each in (built, waited))
    return [
        {**arrow, "ph": "s", "tid": _row(built), "ts": left},
        {**arrow, "ph": "f", "bp": "e", "tid": _row(waited), "ts": arrived},
    ]


def _ready(batches: Iterable[RecentBatch], process: int) -> Iterator[dict[str, Any]]:
    """Events of the counter of complete batches."""
    changes = []
    for batch in batches:
        built, waited = _last_build_span(batch), _wait(batch)
        if built is not None and waited is not None:
            changes += [(built[2], 1), (max(waited[2], built[2]), -1)]
    ready = 0
    for time_ns, change in sorted(changes):
        ready = max(ready + change, 0)
        yield {"ph": "C", "name": "ready batches", "pid": process, "ts": time_ns, "args": {"ready": ready}}


def _last_build_span(batch: RecentBatch) -> SpanTuple | None:
    return max(
        (timed for timed in batch.spans if timed[3] != MAIN and is_block(timed[0])),
        key=lambda timed: timed[2],
        default=None,
    )


def _wait(batch: RecentBatch) -> SpanTuple | None:
    return next((timed for timed in batch.spans if timed[0] == LOOP[0]), None)
