"""Proof from audit logs that a live stream was read without gaps.

Its epochs continue each other, and it has no known end. What is proven is that each record of a partition begins where
the one before it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from feedline.loader.report.attempts import Audit, JobAttempt, Record


@dataclass(slots=True)
class _Stretch:
    """Messages of one partition that one record proves."""

    attempt: JobAttempt
    begun: Any
    reached: Any
    start: int
    """Messages before, as the loader's state counts them."""
    stop: int
    rank: int
    instance: str


@dataclass(slots=True)
class _Read:
    """Messages of one partition that were read so far."""

    number: int
    stretches: list[_Stretch] = field(default_factory=list)
    is_known: bool = False
    """True if there is a record of the partition."""

    def roll_back(self, place: Any, count: int) -> None:
        """Forget deliveries behind a place.

        A state counts so many messages before it.
        """
        stretches = self.stretches
        while len(stretches) > 1 and stretches[-1].begun >= place:
            stretches.pop()
        last = stretches[-1]
        last.reached, last.stop = place, max(last.start, min(last.stop, count))


def check_live(attempts: Sequence[JobAttempt], result: Audit) -> None:
    """Check the attempts of a live stream, in the order of time."""
    partitions = [_Read(number) for number in range(attempts[0].first["partitions"])]
    proven = dict.fromkeys((attempt.epoch for attempt in attempts), 0)
    for read in partitions:
        for attempt in attempts:
            for rank, record in _records(attempt, read.number):
                _add(read, attempt, rank, record, result)
        for stretch in read.stretches:
            proven[stretch.attempt.epoch] += stretch.stop - stretch.start
    loader, idle = attempts[0].loader, [str(read.number) for read in partitions if not read.is_known]
    if idle:
        result.notes.append(f"{loader}: no rank has a record of partition {', '.join(idle)}")
    faulty = {fault.epoch for fault in result.faults if fault.loader == loader}
    result.proven.update(((loader, epoch), count) for epoch, count in proven.items() if epoch not in faulty)


def _records(attempt: JobAttempt, partition: int) -> list[tuple[int, Record]]:
    """Records of a partition, by their start."""
    found = [
        (rank, record) for rank, records in attempt.ranks.items() for record in records
        if record["partition"] == partition
    ]  # fmt: skip
    return sorted(found, key=lambda each: (each[1]["places"], each[0]))


def _add(read: _Read, attempt: JobAttempt, rank: int, record: Record, result: Audit) -> None:
    """Add a record; return a fault at a wrong start."""
    (begun, reached), where = record["places"], f"of partition {read.number}"
    last = read.stretches[-1] if read.stretches else None
    is_first, read.is_known = not read.is_known, True
    if is_first and record["start"]:
        text = f"the first {record['start']} messages {where}, up to {begun}: no rank has a record of them"
        result.fault("lost", attempt, text)
    if last is not None and begun > last.reached:
        result.fault("lost", attempt, f"messages from {last.reached} to {begun} {where}: rank {rank} began after them")
    elif last is not None and begun < last.reached:
        if _goes_back(read, attempt, record, last):
            read.roll_back(begun, record["start"])
        elif reached > begun:
            upto = min(reached, last.reached)
            result.fault("twice", attempt, f"messages from {begun} to {upto} {where}: {_who(rank, record, last)}")
    if begun < reached or last is None:
        counts = record["start"], record["stop"]
        read.stretches.append(_Stretch(attempt, begun, reached, *counts, rank, record["instance"]))


def _goes_back(read: _Read, attempt: JobAttempt, record: Record, last: _Stretch) -> bool:
    """True if a record begins at an earlier state.

    The model was rolled back with it.
    """
    if last.attempt is attempt:
        return False  # another rank has read the partition, too
    is_new_run = record["instance"] != last.instance and record["places"][0] == read.stretches[0].begun
    return bool(record["resumed"] or is_new_run)


def _who(rank: int, record: Record, last: _Stretch) -> str:
    if last.rank != rank:
        return f"by ranks {last.rank} and {rank}"
    if last.instance == record["instance"]:
        return f"by rank {rank} again"
    return f"rank {rank} began at a committed place, without a state"
