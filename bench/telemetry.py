"""Cost of telemetry for each batch, of publications, and of the run log.

A loop over batches that take no time runs unchanged, and with all recording replaced by calls that do nothing. The
difference is the cost of a batch: all clocks, spans, sums and the words of the page. The same is measured for a loop
over a mapped array, whose read is timed in addition. Publications and the lines of a run log are timed separately, as a
share of the time between two of them. CPU time is measured, which other programs on the machine hardly affect. Prints a
table; `--write` stores it in bench/results/telemetry.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep, thread_time
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np

import feedline as fl
from feedline.datasets.arrays import rows
from feedline.loader.building import builder
from feedline.loader.monitoring import heartbeat
from feedline.loader.monitoring.monitor import Monitor
from feedline.loader.report.run_log import INTERVAL_S, RunLog
from harness import RESULTS, machine
from overhead import Empty

BATCHES = 20_000

BATCH_S = 1e-4
"""The time of a batch at 10,000 batches per second."""


def _nothing(*_: object) -> int:
    return -1


def _pass_on(draw: Callable[[], bool]) -> bool:
    return draw()


def _nothing_recorded(*_: object) -> list[Any]:
    return []


class _Nothing:
    """Recorder and clock that record nothing."""

    spans: Any = None
    finish = staticmethod(_nothing_recorded)
    begin = end = call = deliver = staticmethod(_nothing)
    sample = staticmethod(_pass_on)

    def __init__(self, *_: object) -> None: ...


NOTHING = _Nothing()


def _no_recorder() -> _Nothing:
    return NOTHING


@contextmanager
def without_recording() -> Iterator[None]:
    """Replace the parts that record by calls that do nothing."""
    with (
        mock.patch.object(builder, "recorder_of_thread", _no_recorder),
        mock.patch.object(heartbeat, "_new_clock", _Nothing),
        mock.patch.object(rows, "READ_FILES", None),
    ):
        yield


PIECE = 500
"""Batches that are timed together, so few that other programs do not disturb all of them."""


def batch_s(make: Callable[[], fl.DataLoader[Any]]) -> float:
    """CPU seconds per batch of a loop over batches that take hardly any time: those of the fastest piece."""
    loader, best_s = make(), 1.0
    began = thread_time()
    for number, _ in enumerate(loader, 1):
        if not number % PIECE:
            ended = thread_time()
            best_s, began = min(best_s, ended - began), ended
    return best_s / PIECE


def call_s(act: Callable[[], object], times: int) -> float:
    """CPU seconds of one call."""
    began = thread_time()
    for _ in range(times):
        act()
    return (thread_time() - began) / times


def empty() -> fl.DataLoader[Any]:
    """A loader whose batches take no time."""
    return fl.DataLoader(Empty(BATCHES), batch_size=None)


def mapped(path: Path) -> fl.DataLoader[Any]:
    """A loader of rows of the mapped array in a file."""
    return fl.DataLoader(fl.datasets.ArrayFile(path), batch_size=16)


def stand_ins(make: Callable[[], fl.DataLoader[Any]]) -> float:
    """Calls of the stand-ins for each batch: without recording, there would be none."""
    codes = {each.__code__ for each in (_nothing, _nothing_recorded, _pass_on, _no_recorder)}
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code in codes

    with without_recording():
        batches = iter(make())
        next(batches)
        sys.setprofile(count)
        try:
            for _ in range(PIECE):
                next(batches)
        finally:
            sys.setprofile(None)
    return calls / PIECE


def recording_s(rounds: int, make: Callable[[], fl.DataLoader[Any]]) -> float:
    """Cost of recording a batch: the least of some rounds, each with both forms in turn."""
    recorded, bare = [], []
    for _ in range(rounds):
        recorded.append(batch_s(make))
        with without_recording():
            bare.append(batch_s(make))
    stand_ins_s = stand_ins(make) * min(call_s(_nothing, 100_000) for _ in range(rounds))
    return min(recorded) - min(bare) + stand_ins_s


def publication_share() -> dict[str, float]:
    """Shares of the time that publications, verdicts and lines of a run log take in a running loop."""
    spent = dict.fromkeys(("publication", "verdict", "run log"), 0.0)

    def timed(owner: Any, name: str, part: str) -> Any:
        plain = getattr(owner, name)

        def run(*arguments: Any, **named: Any) -> Any:
            began = thread_time()
            try:
                return plain(*arguments, **named)
            finally:
                spent[part] += thread_time() - began

        return mock.patch.object(owner, name, run)

    with (
        tempfile.TemporaryDirectory() as folder,
        timed(Monitor, "_publish", "publication"),
        timed(Monitor, "_update_verdict", "verdict"),
        timed(RunLog, "write", "run log"),
    ):
        seconds = _loop(Path(folder) / "run.jsonl")
    spent["publication"] -= spent["verdict"] + spent["run log"]
    return {part: each / seconds for part, each in spent.items()}


def _loop(log: Path, seconds: float = 3 * INTERVAL_S) -> float:
    """Seconds of a loop with a run log, from its second verdict on."""
    with fl.DataLoader(Empty(10**9), batch_size=64, num_workers=2, worker_method="thread", log=log) as loader:
        for number, _ in enumerate(loader):
            sleep(0.002)
            if number * 0.002 > seconds:
                break
        return loader.stats().wall_s


def main() -> None:
    """Measure all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the results file")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        np.save(path, np.zeros((16 * BATCHES, 4), np.float32))
        costs = {
            "recording a batch": recording_s(options.rounds, empty),
            "recording one of a mapped array": recording_s(options.rounds, lambda: mapped(path)),
        }
    shares = publication_share()
    lines = [
        "| part | cost |",
        "|---|---:|",
        *(
            f"| {name} | {cost_s * 1e6:.2f} µs, {100 * cost_s / BATCH_S:.2f} % of a batch at 10,000 batches/s |"
            for name, cost_s in costs.items()
        ),
        *(f"| {part} | {100 * share:.3f} % of the time |" for part, share in shares.items()),
    ]
    print("\n".join(lines))
    if options.write:
        result = {
            "machine": machine(),
            "lines": lines,
            "costs_s": costs,
            "shares": shares,
        }
        path = RESULTS / "telemetry.json"
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
