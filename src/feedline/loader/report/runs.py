"""Runs in run logs: reports of loaders and ranks, newest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from feedline.loader.report.page_html import RankReport, moment
from feedline.loader.report.stats import count, seconds

MOST_POINTS = 480
"""Points of a history, most of which a chart still shows."""


MOST_LOADERS = 8
"""Loaders of one name, rank and run that are reported: some scripts make one for each epoch."""


MOST_RUNS = 20
"""Runs that are reported."""


EARLY_SHARE = 0.9
"""Share of the batches of other ranks below which a rank has ended early."""


DIFFERENT_S = 1.0
"""Difference of two clocks that is worth a note: ranks notice the end of a comparison milliseconds apart."""


APART_S = 60.0
"""Time between the first lines of ranks above which they did not begin together."""


_NUMBERS = (
    "wait_s", "step_s", "startup_s", "run_delay_s", "epoch", "batches", "samples", "ready", "worker_nbytes",
    "in_flight_nbytes", "skipped", "restarts", "pid",
)  # fmt: skip


_ABSENT: Mapping[str, Any] = {
    **dict.fromkeys(_NUMBERS, 0),
    **dict.fromkeys(("padding_share", "throttled_share", "worker_growth_nbytes")),
    **dict.fromkeys(("script", "host", "dataset"), "unknown"),
    **{name: {} for name in ("stages", "loop", "stores", "settings", "verdict")},
    "slowest": (),
    "world_size": 1,
}
"""Values of figures that logs of earlier versions lack."""


_NO_TIMES: Mapping[str, Any] = {
    **dict.fromkeys(("count", "total_s", "p50_s", "p90_s", "p99_s", "max_s"), 0),
    "cpu_s": None,
}


_CHARTED = ("time_s", "wall_s", "epoch", "batches", "samples", "wait_s", "step_s", "ready", "worker_nbytes")


def is_of_run_log(line: Any) -> bool:
    """True for a line of a run log, of any version."""
    return (
        isinstance(line, Mapping)
        and isinstance(line.get("loader"), str)
        and isinstance(line.get("rank"), int)
        and all(isinstance(line.get(name), int | float) for name in ("wall_s", "time_s"))
    )


@dataclass(slots=True)
class _LoaderLog:
    """Lines of one loader object, in the order of their file."""

    first: Mapping[str, Any]
    last: Mapping[str, Any]
    points: list[Mapping[str, Any]] = field(default_factory=list)
    was_set_back: bool = False
    """The clock was set back between two lines."""
    met_s: dict[str, float] = field(default_factory=dict)
    """Times of the comparisons with other ranks, by their name."""
    _step: int = 1
    _until_point: int = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line; of many, only some become points."""
        self.was_set_back |= line["time_s"] < self.last["time_s"] - 1.0
        self.last = line
        self.met_s.update([line["met"]] if line.get("met") else [])
        self._until_point -= 1
        if self._until_point > 0:
            return
        self._until_point = self._step
        self.points.append(_point(line))
        if len(self.points) > MOST_POINTS:
            self.points, self._step = self.points[::2], 2 * self._step

    @property
    def start_s(self) -> float:
        """Time of the first line."""
        return float(self.first["time_s"])

    @property
    def process(self) -> tuple[Any, ...]:
        """Host, number and name of the process that made the loader."""
        return self.first.get("host"), self.first.get("pid"), self.first.get("process")

    @property
    def world_size(self) -> int:
        """Number of ranks that share the data."""
        return int(self.first.get("world_size", 1))

    def report(self, run: int) -> RankReport:
        """The last figures, with the history."""
        last = _point(self.last)
        points = self.points if self.points[-1] == last else [*self.points, last]
        return RankReport(_complete(self.last), points, run=run, start_s=self.start_s)


def _point(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line.get(name, 0) for name in _CHARTED} | {"event": line.get("event", "interval")}


def _complete(line: Mapping[str, Any]) -> dict[str, Any]:
    """The figures with values for those that the log lacks."""
    figures = {**_ABSENT, **line}
    for kind in ("stages", "loop"):
        figures[kind] = {stage: {**_NO_TIMES, **times} for stage, times in figures[kind].items()}
    return figures


def reports_of_logs(lines: Iterable[Mapping[str, Any]]) -> tuple[list[RankReport], list[str]]:
    """Reports of each run, loader and rank, and notes on gaps.

    The newest run is first. All lines satisfy `is_of_run_log`; those of one loader are in the order of its file.
    """
    reports: list[RankReport] = []
    notes: list[str] = []
    runs = list(_runs(_loader_logs(lines)))[::-1]
    for number, logs in enumerate(runs[:MOST_RUNS]):
        of_run, further = _reports_of_run(logs, number)
        reports += of_run
        notes += [f"Run of {moment(logs[0].start_s)}: {note}" if len(runs) > 1 else note for note in further]
    if len(runs) > MOST_RUNS:
        notes.append(f"{count(len(runs) - MOST_RUNS, 'earlier run')} in these logs: not shown.")
    return reports, notes


def _loader_logs(lines: Iterable[Mapping[str, Any]]) -> list[_LoaderLog]:
    """The lines by loader object, oldest first."""
    logs: dict[tuple[Any, ...], _LoaderLog] = {}
    restarts = Counter[tuple[Any, ...]]()
    for line in lines:
        name = (line["rank"], line["loader"], line.get("host"), line.get("pid"))
        key = (*name, line.get("instance"), restarts[name])
        known = logs.get(key)
        # Earlier versions have no instance: a new loader begins to count again.
        if known is not None and "instance" not in line and line.get("batches", 0) < known.last.get("batches", 0):
            restarts[name] += 1
            key, known = (*name, None, restarts[name]), None
        if known is None:
            known = logs[key] = _LoaderLog(line, line)
        known.add(line)
    return sorted(logs.values(), key=lambda log: log.start_s)


def _runs(logs: Iterable[_LoaderLog]) -> Iterator[list[_LoaderLog]]:
    """The loaders by run, oldest first.

    A run has one process for each rank: one whose rank is there already belongs to the next run.
    """
    run: list[_LoaderLog] = []
    for log in logs:
        ranks = {each.first["rank"] for each in run}
        # A process without ranks is a run by itself.
        is_ranked = bool(run) and log.world_size == run[0].world_size > 1
        joins = is_ranked and log.first["rank"] not in ranks
        is_next = not joins and log.process not in {each.process for each in run}
        if run and is_next:
            yield run
            run = []
        run.append(log)
    if run:
        yield run


def _reports_of_run(logs: Sequence[_LoaderLog], run: int) -> tuple[list[RankReport], list[str]]:
    """The reports of a run by loader and rank, with notes."""
    groups: dict[tuple[str, int], list[_LoaderLog]] = {}
    for log in logs:
        groups.setdefault((log.first["loader"], log.first["rank"]), []).append(log)
    reports, notes = list[RankReport](), list(_notes(logs))
    for (loader, rank), of_name in sorted(groups.items()):
        shown = of_name[-MOST_LOADERS:]
        for place, log in enumerate(shown, len(of_name) - len(shown) + 1):
            name = f"{loader}, no. {place}" if len(of_name) > 1 else loader
            reports.append(replace(log.report(run), name=name))
        if len(of_name) > len(shown):
            notes.append(f"Rank {rank} made {len(of_name)} loaders named {loader}: the last {len(shown)} are shown.")
    reports.sort(key=lambda report: (report.figures["loader"], report.name, report.figures["rank"]))
    return reports, notes


def _notes(logs: Sequence[_LoaderLog]) -> Iterator[str]:
    """Sentences on missing ranks, ranks that ended early, and clocks."""
    ranks = {log.first["rank"] for log in logs}
    missing = sorted(set(range(min(logs[0].world_size, _MOST_RANKS))) - ranks)
    if missing and logs[0].world_size > 1:
        named = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        yield f"There is no log of {'rank' if len(missing) == 1 else 'ranks'} {named}."
    yield from _notes_on_ends(logs)
    yield from _notes_on_clocks(logs, ranks)
    for rank in sorted({log.first["rank"] for log in logs if log.was_set_back}):
        yield f"The clock of rank {rank} was set back during the run: its times are those of both settings."


_MOST_RANKS = 1 << 16


def _notes_on_clocks(logs: Sequence[_LoaderLog], ranks: set[int]) -> Iterator[str]:
    """Sentences on clocks that differ.

    They are compared by the latest moment that all ranks of a loader have in common. Without one, only the starts of
    the logs are known, and ranks may begin at different times.
    """
    met: dict[int, dict[str, float]] = {rank: {} for rank in ranks}
    for log in logs:
        met[log.first["rank"]].update(log.met_s)
    if common := set.intersection(*map(set, met.values())):
        latest = max(common, key=met[min(ranks)].__getitem__)
        clocks = {rank: times[latest] for rank, times in met.items()}
        fast, slow = max(clocks, key=clocks.__getitem__), min(clocks, key=clocks.__getitem__)
        if clocks[fast] - clocks[slow] > DIFFERENT_S:
            yield f"The clock of rank {fast} is {seconds(clocks[fast] - clocks[slow])} ahead of that of rank {slow}."
        return
    first = {rank: min(log.start_s for log in logs if log.first["rank"] == rank) for rank in ranks}
    late, early = max(first, key=first.__getitem__), min(first, key=first.__getitem__)
    if first[late] - first[early] > APART_S:
        yield (
            f"The log of rank {late} begins {seconds(first[late] - first[early])} after that of rank {early}: their "
            "clocks differ, or they are of different runs."
        )


def _notes_on_ends(logs: Sequence[_LoaderLog]) -> Iterator[str]:
    """Sentences on ranks that have fewer batches than others."""
    batches: dict[str, Counter[int]] = {}
    for log in logs:
        batches.setdefault(log.first["loader"], Counter())[log.first["rank"]] += log.last.get("batches", 0)
    for loader, of_ranks in batches.items():
        most = max(of_ranks.values())
        for rank, number in sorted(of_ranks.items()):
            if number < EARLY_SHARE * most - 1:
                last_s = max(log.last["time_s"] for log in logs if log.first["rank"] == rank)
                yield (
                    f"Rank {rank} ended early, or its log is not complete: {count(number, 'batch')} of {loader} until "
                    f"{moment(last_s)}, where other ranks have {most:,}."
                )
