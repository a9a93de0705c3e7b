"""Contests: contestants that run in turns on one machine, compared with a baseline by their medians.

    contest = Contest("tokens", unit="batches/s", baseline="torch, 0 workers")
    contest.add("torch, 0 workers", run_torch, work=200)
    contest.add("feedline", run_feedline, work=200)
    contest.run(rounds=7).publish()

They run in turns because the clock and load of a machine drift, and all contestants need the same conditions.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Standing:
    """Result of one contestant: median and quartiles of its `runs`, and the ratio to the baseline."""

    name: str
    median: float
    low: float
    high: float
    ratio: float
    runs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished contest; standings are in the order in which contestants were added."""

    name: str
    unit: str
    baseline: str
    standings: tuple[Standing, ...]

    def __getitem__(self, contestant: str) -> Standing:
        return next(standing for standing in self.standings if standing.name == contestant)

    def table(self) -> Table:
        table = Table("", title=f"{self.name}, {self.unit}", caption=f"ratio to {escape(self.baseline)}")
        for heading in ("median", "quartiles", "ratio"):
            table.add_column(heading, justify="right")
        for s in self.standings:
            table.add_row(escape(s.name), _short(s.median), f"{_short(s.low)} … {_short(s.high)}", f"{s.ratio:.2f}")
        return table

    def show(self) -> None:
        """Print the table."""
        Console().print(self.table())

    def publish(self, *packages: str) -> None:
        """Print the table, and write `results/<name>.json` with the versions of `packages` and the usual ones."""
        self.show()
        RESULTS.mkdir(exist_ok=True)
        extra = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": {name: metadata.version(name) for name in ("feedline", "torch", "numpy", *packages)},
        }
        text = json.dumps({**asdict(self), **extra}, indent=2, ensure_ascii=False)
        (RESULTS / f"{file_name(self.name)}.json").write_text(text + "\n")


class Contest:
    """Contestants that do the same work.

    `unit` is a rate such as "batches/s", or "s" for the time itself.
    """

    def __init__(self, name: str, *, unit: str = "s", baseline: str) -> None:
        self.name, self.unit, self.baseline = name, unit, baseline
        self._measures: dict[str, Callable[[], float]] = {}

    def add(self, name: str, fn: Callable[[], object], work: float = 1.0) -> None:
        """Time `fn`; one call does `work` units (batches, samples, bytes, ...)."""

        def measure() -> float:
            start = perf_counter()
            fn()
            seconds = perf_counter() - start
            return seconds / work if self.unit == "s" else work / seconds

        self.measure(name, measure)

    def measure(self, name: str, measure: Callable[[], float]) -> None:
        """Add a contestant whose figure `measure` returns, instead of the time of one call."""
        self._measures[name] = measure

    def replay(self, name: str, figures: Iterable[float]) -> None:
        """Add a contestant whose figures, one for each round, are known from other runs."""
        self.measure(name, iter(figures).__next__)

    def run(self, rounds: int = 7, warm_up: int = 1) -> Outcome:
        """Run every contestant once per round, in rotating order, after `warm_up` uncounted rounds."""
        runs: dict[str, list[float]] = {name: [] for name in self._measures}
        with Progress(transient=True) as progress:
            task = progress.add_task(self.name, total=(rounds + warm_up) * len(runs))
            for turn in range(rounds + warm_up):
                for name in _rotated(list(runs), turn):
                    gc.collect()
                    runs[name].append(self._measures[name]())
                    progress.advance(task)
        return self._outcome({name: figures[warm_up:] for name, figures in runs.items()})

    def _outcome(self, runs: dict[str, list[float]]) -> Outcome:
        base = statistics.median(runs[self.baseline])
        standings = []
        for name, figures in runs.items():
            median = statistics.median(figures)
            low, _, high = statistics.quantiles(figures, n=4, method="inclusive") if len(figures) > 1 else [median] * 3
            standings.append(Standing(name, median, low, high, median / base, tuple(figures)))
        return Outcome(self.name, self.unit, self.baseline, tuple(standings))


def machine() -> dict[str, str | int]:
    """The machine on which the figures were measured."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **_gpu(),
    }


def _gpu() -> dict[str, str]:
    """Name and driver of the GPU that torch uses; nothing without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": str(torch.version.cuda)}


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _rotated(names: list[str], turn: int) -> list[str]:
    first = turn % len(names)
    return names[first:] + names[:first]


def file_name(title: str) -> str:
    return re.sub(r"[^\w.]+", "-", title)


def _short(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
