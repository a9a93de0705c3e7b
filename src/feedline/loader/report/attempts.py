"""Attempts of a job, from the records of audit logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    def processes(self) -> set[tuple[str, int]]:
        return {(record["host"], record["pid"]) for runs in self.ranks.values() for record in runs}

    @property
    def delivered_by_all(self) -> int:
        """Position up to which all ranks are known to have delivered."""
        if len(self.ranks) < self.world_size:
            return self.begun
        return min(max(int(record["stop"]) for record in runs) for runs in self.ranks.values())


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
