"""Attempts of a job, from the records of audit logs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, NamedTuple

AuditLine = dict[str, Any]


class Fault(NamedTuple):
    """Samples that were lost, delivered twice, or read against the schedule."""

    kind: str
    """"lost", "twice" or "other"."""
    loader: str
    epoch: int
    text: str


@dataclass(slots=True)
class Audit:
    """Result of an audit."""

    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    proven: dict[tuple[str, int], int] = field(default_factory=dict)
    """Positions of each (loader, epoch) that were delivered exactly once."""
    attempts: int = 0

    def fault(self, kind: str, attempt: JobAttempt, text: str) -> None:
        """Add a fault of an attempt."""
        self.faults.append(Fault(kind, attempt.loader, attempt.epoch, text))


@dataclass(slots=True)
class JobAttempt:
    """One epoch of all ranks, until its end or a kill."""

    loader: str
    epoch: int
    begun: int
    world_size: int
    batch: int
    ranks: dict[int, list[AuditLine]] = field(default_factory=dict)

    @property
    def started_s(self) -> float:
        return float(min(record["started_s"] for runs in self.ranks.values() for record in runs))

    @property
    def seen_s(self) -> float:
        return float(max(record["seen_s"] for runs in self.ranks.values() for record in runs))

    @property
    def first(self) -> AuditLine:
        return next(iter(self.ranks.values()))[0]

    @property
    def processes(self) -> set[tuple[str, int, str]]:
        return {(record["host"], record["pid"], record["process"]) for runs in self.ranks.values() for record in runs}

    @property
    def delivered_by_all(self) -> int:
        """Position up to which all ranks are known to have delivered."""
        if len(self.ranks) < self.world_size:
            return self.begun
        return min(_reach(self.begun, runs) for runs in self.ranks.values())

    def already(self, rank: int) -> set[tuple[int, int]]:
        """Ranges delivered ahead in the state that the attempt began with."""
        return {tuple(span) for record in self.ranks.get(rank, ()) for span in record["already"]}


def _reach(begun: int, runs: Sequence[AuditLine]) -> int:
    """Position up to which a rank has delivered."""
    if runs[0]["in_order"]:
        return max(int(run["stop"]) for run in runs)
    # Batches out of order leave gaps: the next attempt would begin at the first of them.
    spans = chain(
        ((run["start"], run["stop"]) for run in runs), (tuple(span) for run in runs for span in run["already"])
    )
    reach = begun
    for start, stop in sorted(spans):
        reach = max(reach, stop) if start <= reach else reach
    return int(reach)


@dataclass(slots=True)
class _JobLaunch:
    """Loaders of all ranks that began together.

    `ranks` holds the records of the iterations of each rank, in the order of time.
    """

    ranks: dict[int, list[list[AuditLine]]] = field(default_factory=dict)

    @property
    def first(self) -> AuditLine:
        return next(iter(self.ranks.values()))[0][0]

    def seen_s(self, rank: int | None = None) -> float:
        """Latest time of a record, of all ranks or of one."""
        loaders = self.ranks.values() if rank is None else [self.ranks[rank]]
        return float(max(run["seen_s"] for iterations in loaders for runs in iterations for run in runs))

    def attempts(self) -> Iterator[JobAttempt]:
        """Attempts: the n-th iterations of each epoch, over all ranks."""
        found: dict[tuple[int, int], JobAttempt] = {}
        for rank, iterations in self.ranks.items():
            times: dict[int, int] = defaultdict(int)
            for runs in iterations:
                first = runs[0]
                epoch = first["epoch"]
                times[epoch] += 1
                attempt = found.setdefault(
                    (epoch, times[epoch]),
                    JobAttempt(first["loader"], epoch, first["begun"], first["world_size"], first["batch"]),
                )
                attempt.ranks[rank] = runs
        yield from found.values()


def loaders_of(records: Iterable[AuditLine]) -> dict[str, list[AuditLine]]:
    """The records of each loader, by a unique name.

    A label is not enough: it passes to the next loader when one is freed, and ranks may have other labels for the same
    loader. So a loader is known by its dataset and order, and by its label if a process has several that are alike.
    """
    ordered = sorted(records, key=lambda record: record["started_s"])
    labels: dict[Any, set[int]] = defaultdict(set)
    for record in ordered:
        labels[_labels_key(record)].add(_split(record["loader"])[1])
    groups: dict[Any, list[AuditLine]] = defaultdict(list)
    for record in ordered:
        name, number = _split(record["loader"])
        place = sorted(labels[_labels_key(record)]).index(number)
        groups[name, record["unit"], place, record["order"]].append(record)
    loaders: list[tuple[Any, list[AuditLine]]] = []
    for (*kind, _), group in groups.items():
        same = next((other for others, other in loaders if others == kind and _is_same_loader(other, group)), None)
        if same is None:
            loaders.append((kind, group))
        else:
            same += group
    named: dict[str, list[AuditLine]] = {}
    for (name, *_), group in loaders:
        label = next(
            each for each in chain([group[0]["loader"]], (f"{name}-{n}" for n in count(2))) if each not in named
        )
        named[label] = [{**record, "loader": label} for record in group]
    return named


def _labels_key(record: AuditLine) -> tuple[Any, ...]:
    process = record["host"], record["pid"], record["process"], record["rank"]
    return *process, _split(record["loader"])[0], record["order"]


def _split(label: str) -> tuple[str, int]:
    """A label without its number, and the number."""
    found = _LABEL.fullmatch(label)
    assert found is not None
    return found[1] + (found[3] or ""), int(found[2] or 1)


_LABEL = re.compile(r"(.*?)(?:-(\d+))?( of rank \d+)?", re.DOTALL)


def _is_same_loader(earlier: Sequence[AuditLine], later: Sequence[AuditLine]) -> bool:
    """True for parts of one loader although their orders differ.

    One of its ranks may have read another order, which is a fault, or the order may have changed between two epochs.
    """
    ranks, others = ({(record["world_size"], record["rank"]) for record in part} for part in (earlier, later))
    if ranks.isdisjoint(others) and {world for world, _ in ranks} == {world for world, _ in others}:
        return True
    last, first = max(record["epoch"] for record in earlier), min(record["epoch"] for record in later)
    return bool(last < first)


def attempts_of(records: Sequence[AuditLine], result: Audit) -> Iterator[JobAttempt]:
    """Group the records by starts of the job, epochs and ranks."""
    loaders: dict[str, dict[float, list[AuditLine]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        loaders[record["instance"]][record["started_s"]].append(record)
    ordered = sorted(([runs for _, runs in sorted(each.items())] for each in loaders.values()), key=_started)
    launch = _JobLaunch()
    for iterations in ordered:
        if launch.ranks and _begins_another(launch, iterations, result):
            yield from launch.attempts()
            launch = _JobLaunch()
        launch.ranks.setdefault(iterations[0][0]["rank"], iterations)
    yield from launch.attempts()


def _started(iterations: list[list[AuditLine]]) -> tuple[float, int]:
    return iterations[0][0]["started_s"], iterations[0][0]["rank"]


def _begins_another(launch: _JobLaunch, iterations: list[list[AuditLine]], result: Audit) -> bool:
    """True if a loader belongs to a later launch.

    A loader that contradicts this launch is recorded in `result` as a fault.
    """
    mine, first = iterations[0][0], launch.first
    rank, world_size = mine["rank"], mine["world_size"]
    if rank in launch.ranks:
        if mine["started_s"] >= launch.seen_s(rank):
            return True
        stop = max(run["stop"] for runs in iterations for run in runs)
        text = f"two processes read as rank {rank} of {world_size}, from position {mine['begun']} to {stop - 1}"
        result.faults.append(Fault("twice", mine["loader"], mine["epoch"], text))
        return False
    # A rank of a stream may have nothing left in the epoch that others resume.
    compared = ("world_size",) if mine["unit"] == "partition" else ("epoch", "begun", "world_size", "batch")
    if all(mine[name] == first[name] for name in compared):
        return False
    if mine["started_s"] >= launch.seen_s():
        return True
    text = (
        f"rank {rank} began at position {mine['begun']} of epoch {mine['epoch']} as one of {world_size} ranks, while "
        f"others began at position {first['begun']} of epoch {first['epoch']} as ranks of {first['world_size']}"
    )
    result.faults.append(Fault("other", mine["loader"], mine["epoch"], text))
    return False
