#!/usr/bin/env python3
"""Pytest plugin and table: seconds of CPU and of waiting, for each test, file and folder.

Run the tests with it, then print the table:

    PYTHONPATH=scripts .venv/bin/python -m pytest -p test_costs --costs=build/costs.jsonl tests/stores
    scripts/test_costs.py build/costs.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one test, with its fixtures."""

    test: str
    wall_s: float
    cpu_s: float  # of this process and all descendants

    @property
    def waiting_s(self) -> float:
        return max(0.0, self.wall_s - self.cpu_s)


def tree_cpu_s() -> float:
    """CPU seconds so far of this process and its descendants, ended ones included."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:  # ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = os.getpid()
    return sum(ticks for pid, (_, ticks) in parents.items() if _descends(pid, ours, parents)) * TICK_S


def _descends(pid: int, ancestor: int, parents: dict[int, tuple[int, int]]) -> bool:
    while pid != ancestor and pid in parents:
        pid = parents[pid][0]
    return pid == ancestor


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="append the seconds of each test to this file, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    # The processes of pytest-xdist run the tests; the controller would record each a second time.
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and (path := config.getoption("--costs")) is not None:
        config.pluginmanager.register(_Recorder(path.resolve()), "costs-recorder")


class _Recorder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = time.perf_counter(), tree_cpu_s()

    def _append(self, test: str) -> None:
        now_s, before_s = time.perf_counter(), time.process_time()
        cpu_s = tree_cpu_s()
        cost = Cost(test, now_s - self.last[0], cpu_s - self.last[1])
        with self.path.open("a") as lines:
            lines.write(json.dumps(asdict(cost)) + "\n")
        # The next test does not pay for the milliseconds of this.
        self.last = time.perf_counter(), cpu_s + time.process_time() - before_s

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._append(f"collection::{len(session.items)} tests")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._append(nodeid)


def table(costs: list[Cost], name: Callable[[str], str], rows: int) -> Iterator[str]:
    """The most expensive groups first, with CPU, waiting and number of cases."""
    groups: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        groups[name(cost.test)].append(cost)
    yield f"{'CPU s':>8} {'waits s':>8} {'cases':>6}"
    totals = [
        (sum(cost.cpu_s for cost in group), sum(cost.waiting_s for cost in group), len(group), title)
        for title, group in groups.items()
    ]
    for cpu_s, waiting_s, cases, title in sorted(totals, key=lambda row: -row[0] - row[1])[:rows]:
        yield f"{cpu_s:8.1f} {waiting_s:8.1f} {cases:6} {title}"


def main() -> None:
    """Print the tables of folders, files and test functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("costs", type=Path, help="the file that `--costs` wrote")
    parser.add_argument("--rows", type=int, default=40, help="rows of each table")
    options = parser.parse_args()
    costs = [Cost(**json.loads(line)) for line in options.costs.read_text().splitlines()]
    for name in (
        lambda _: "all",
        lambda test: "/".join(test.split("/")[:2]),
        lambda test: test.partition("::")[0],
        lambda test: test.partition("[")[0],
    ):
        print(*table(costs, name, options.rows), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
