"""Proof from audit logs that each position was delivered exactly once.

A run may have been killed and resumed at other world sizes. Deliveries after the state from which the next attempt
began were rolled back, with the model, and do not count. Epochs of a live stream continue each other and have no known
end: each record of a partition has to begin where the one before it ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.core.schedule import Share
from feedline.loader.report.attempts import Audit, AuditLine, JobAttempt, attempts_of, loaders_of
from feedline.loader.report.audit_log import ZERO_SUMS, added, pair_digest, power_sums

IndicesAt = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
"""Function of an epoch and positions that returns the schedule's indices."""

_CHUNK = 1 << 18
"""Positions of a rank that are computed at once, in 2 MiB."""


def audit(
    records: Iterable[AuditLine],
    indices_at: IndicesAt | None = None,
    compares: Callable[[AuditLine], bool] | None = None,
) -> Audit:
    """Audit the records of all ranks and restarts.

    With `indices_at`, the indices that ranks have delivered are compared with those of the schedule, in the records for
    which `compares` is true, by default all.
    """
    result = Audit()
    for of_loader in loaders_of(records).values():
        attempts = sorted(attempts_of(of_loader, result), key=lambda attempt: (attempt.started_s, attempt.epoch))
        result.attempts += len(attempts)
        for attempt in attempts:
            _check_orders(attempt, result)
        if "places" in of_loader[0]:
            check_live(attempts, result)
        elif of_loader[0]["unit"] == "partition":
            check_partitions(attempts, result)
        else:
            is_compared = compares is None or compares(of_loader[0])
            check_positions(attempts, result, indices_at if is_compared else None)
    return result


def _check_orders(attempt: JobAttempt, result: Audit) -> None:
    """Compare the order of the ranks of an attempt."""
    orders = {rank: runs[0]["order"] for rank, runs in attempt.ranks.items()}
    usual = max(set(orders.values()), key=list(orders.values()).count)
    odd = sorted(rank for rank, order in orders.items() if order != usual)
    if odd:
        result.fault("other", attempt, f"rank {_listed(odd)} read another dataset or order than the other ranks")


def check_positions(attempts: Sequence[JobAttempt], result: Audit, indices_at: IndicesAt | None) -> None:
    """Check map-style attempts, in the order of time."""
    proven: dict[int, int] = defaultdict(int)
    limit: tuple[int, int] | None = None
    ends: list[int] = []
    for number, attempt in reversed(list(enumerate(attempts))):
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        stop = _expected_stop(attempt, following, limit, result)
        if limit is None or (attempt.epoch, attempt.begun) < limit:
            limit = attempt.epoch, attempt.begun
        ends.append(stop)
    for attempt, stop in zip(attempts, reversed(ends), strict=True):
        for rank in range(attempt.world_size):
            _check_rank(attempt, rank, stop, result)
        for rank, runs in attempt.ranks.items():
            for run in runs:
                _check_rows(attempt, rank, run, result, indices_at)
        proven[attempt.epoch] += max(0, stop - attempt.begun)
    _prove(attempts[0].loader, proven, result)


def _prove(loader: str, proven: Mapping[int, int], result: Audit) -> None:
    """Record the epochs of a loader that have no fault."""
    faulty = {fault.epoch for fault in result.faults if fault.loader == loader}
    result.proven.update(((loader, epoch), count) for epoch, count in proven.items() if epoch not in faulty)


def _expected_stop(
    attempt: JobAttempt, following: JobAttempt | None, limit: tuple[int, int] | None, result: Audit
) -> int:
    """The position up to which an attempt counts, and must have delivered."""
    if limit is not None and limit <= (attempt.epoch, attempt.begun):
        return attempt.begun  # rolled back as a whole
    if limit is not None and limit[0] == attempt.epoch:
        return limit[1]
    whole = _epoch_end(attempt)
    is_over = any(record["ended"] for runs in attempt.ranks.values() for record in runs)
    if limit is None and not is_over:
        absent = sorted(set(range(attempt.world_size)) - attempt.ranks.keys())
        if absent:
            result.notes.append(f"{attempt.loader}: rank {_listed(absent)} has no audit log of the last attempt")
        return attempt.delivered_by_all
    if whole is None or attempt.delivered_by_all >= whole:
        return attempt.delivered_by_all
    if is_over or following is None or not (following.processes & attempt.processes):
        return whole
    result.notes.append(
        f"{attempt.loader}: the loop left epoch {attempt.epoch} at position {attempt.delivered_by_all} of {whole}"
    )
    return attempt.delivered_by_all


def _epoch_end(attempt: JobAttempt) -> int | None:
    """The end position of a complete epoch; None if unknown."""
    record = attempt.first
    length: int | None = record["length"]
    if length is None or not record["drop_last"]:
        return length
    return attempt.begun + (length - attempt.begun) // attempt.batch * attempt.batch


def _check_rank(attempt: JobAttempt, rank: int, stop: int, result: Audit) -> None:
    """Check that one rank has delivered its rows of [begun, stop) once."""
    records = attempt.ranks.get(rank, [])
    runs = [(run["start"], run["stop"]) for run in records if not _is_nested(run, attempt)]
    runs = sorted([*runs, *attempt.already(rank)])
    whose = f"the rows of rank {rank} of {attempt.world_size}" if attempt.world_size > 1 else "all rows"
    if rank not in attempt.ranks and stop > attempt.begun:
        whose += ", which has no audit log of this attempt"
    reached = attempt.begun
    for start, end in runs:
        if start > reached and reached < stop:
            result.fault("lost", attempt, f"positions {reached} to {min(start, stop) - 1}: {whose}")
        if start < reached:
            result.fault("twice", attempt, f"positions {start} to {min(reached, end) - 1}: {whose}")
        reached = max(reached, end)
    if reached < stop:
        result.fault("lost", attempt, f"positions {reached} to {stop - 1}: {whose}")


def _is_nested(run: AuditLine, attempt: JobAttempt) -> bool:
    """True for a record that another one has absorbed.

    Batches delivered ahead have such records. A kill may come between the two writes.
    """
    others = attempt.ranks[run["rank"]]
    return run["ahead"] and any(
        other is not run and other["start"] <= run["start"] and run["stop"] <= other["stop"] for other in others
    )


def _check_rows(attempt: JobAttempt, rank: int, run: AuditLine, result: Audit, indices_at: IndicesAt | None) -> None:
    """Compare a record with the rank's share of the schedule."""
    if not run["even"]:
        return
    sums, digest = ZERO_SUMS, 0
    for positions in _rows(run, rank):
        sums = tuple(added(sums, power_sums(positions)))  # type: ignore[assignment]
        if indices_at is not None and run["digest"] is not None:
            digest = (digest + pair_digest(positions, indices_at(attempt.epoch, positions))) % 2**64
    where = f"rank {rank} of {attempt.world_size}, positions {run['start']} to {run['settled'] - 1}"
    if list(sums) != run["sums"]:
        result.fault(
            "other", attempt, f"{where}: other rows than the rank's share, {run['sums'][0]} in place of {sums[0]}"
        )
    elif indices_at is not None and run["digest"] is not None and run["unit"] == "sample" and digest != run["digest"]:
        result.fault("other", attempt, f"{where}: other indices than those of the loader's order")


def _rows(run: AuditLine, rank: int) -> Iterator[NDArray[np.int64]]:
    """Positions of a rank's share in the global batches of a record."""
    start, stop, batch = run["start"], run["settled"], run["batch"]
    share = Share(rank, run["world_size"], strided=run["strided"], pad=run["pad"])
    full = (stop - start) // batch
    row = np.array(share.positions(0, batch // share.world_size))
    batches = max(1, _CHUNK // len(row))
    for first in range(0, full, batches):
        starts = start + batch * np.arange(first, min(first + batches, full))
        yield (starts[:, None] + row).reshape(-1)
    rest = stop - start - full * batch
    if rest:
        last = start + full * batch
        positions = np.array(share.positions(last, share.rows_each(rest)), np.int64)
        yield positions[positions < stop]


def check_partitions(attempts: Sequence[JobAttempt], result: Audit) -> None:
    """Check the attempts of a stream, in the order of time."""
    epochs: dict[int, list[JobAttempt]] = defaultdict(list)
    for attempt in attempts:
        if not any(other.epoch < attempt.epoch and other.started_s > attempt.seen_s for other in attempts):
            epochs[attempt.epoch].append(attempt)  # the others were rolled back as a whole
    proven: dict[int, int] = defaultdict(int)
    for epoch, of_epoch in epochs.items():
        later = [attempt for other, of_other in epochs.items() if other > epoch for attempt in of_other]
        rest: dict[int, int] = {}
        for partition in range(of_epoch[0].first["partitions"]):
            reached, ended = _check_partition(partition, of_epoch, result)
            proven[epoch] += reached
            if not ended:
                rest[partition] = reached
        if rest:
            _check_rest(of_epoch[-1], later, rest, result)
    _prove(attempts[0].loader, proven, result)


def _check_rest(last: JobAttempt, later: Sequence[JobAttempt], rest: Mapping[int, int], result: Audit) -> None:
    """Check partitions whose end no rank has read.

    `rest` has the number of samples that were delivered of each, `later` the attempts of later epochs.
    """
    places = ", ".join(f"{partition} from sample {reached} on" for partition, reached in rest.items())
    ends = [all(run["over"] for run in runs) for runs in last.ranks.values()]
    absent = sorted(set(range(min(last.world_size, last.first["partitions"]))) - last.ranks.keys())
    processes = {process for attempt in later for process in attempt.processes}
    if all(ends) and last.first.get("stops"):
        result.notes.append(f"{last.loader}: uneven='stop' left out partition {places} in epoch {last.epoch}")
    elif all(ends) or (later and not (processes & last.processes and not any(ends))):
        for partition, reached in rest.items():
            text = f"partition {partition} from sample {reached} on: no rank has read its end"
            result.fault("lost", last, text)
    elif later:
        result.notes.append(f"{last.loader}: the loop left epoch {last.epoch} before the end of partition {places}")
    elif absent:
        result.notes.append(f"{last.loader}: rank {_listed(absent)} has no audit log of the last attempt")


def _check_partition(partition: int, attempts: Sequence[JobAttempt], result: Audit) -> tuple[int, bool]:
    """Check one partition; returns its samples, and if its end was read."""
    reached, ended = 0, False
    for attempt in attempts:
        if attempt.first["strided"]:
            reached, ended = _check_strides(partition, attempt, reached, result)
            continue
        runs = sorted(
            (run["start"], run["stop"], rank, run["ended"])
            for rank, records in attempt.ranks.items() for run in records if run["partition"] == partition
        )  # fmt: skip
        for number, (start, stop, rank, at_end) in enumerate(runs):
            if start > reached:
                text = f"samples {reached} to {start - 1} of partition {partition}: rank {rank} began after them"
                result.fault("lost", attempt, text)
            if number and start < reached:
                other = runs[number - 1][2]
                text = (
                    f"samples {start} to {min(stop, reached) - 1} of partition {partition}: by ranks {other} and {rank}"
                )
                result.fault("twice", attempt, text)
            reached, ended = stop, at_end
    return reached, ended


def _check_strides(partition: int, attempt: JobAttempt, reached: int, result: Audit) -> tuple[int, bool]:
    """Check a partition of which all ranks read every sample.

    Returns the number of samples that all ranks have passed, and True if the partition has ended.
    """
    stops, ended = [], []
    for rank in range(attempt.world_size):
        runs = [run for run in attempt.ranks.get(rank, []) if run["partition"] == partition]
        if not runs:
            return reached, False  # this rank has delivered nothing in the attempt
        if runs[0]["start"] > reached:
            text = f"samples {reached} to {runs[0]['start'] - 1} of partition {partition}: rank {rank} began after them"
            result.fault("lost", attempt, text)
        stops.append(runs[0]["stop"])
        ended.append(runs[0]["ended"])
    return min(stops), all(ended)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


@dataclass(slots=True)
class _Stretch:
    """Messages of one partition that one record proves."""

    attempt: JobAttempt
    begun: Any
    reached: Any
    start: int
    """Number of messages before the record, as the loader's state counts them."""
    stop: int
    rank: int
    instance: str


@dataclass(slots=True)
class _PartitionRead:
    """Messages of one partition that were read so far."""

    number: int
    stretches: list[_Stretch] = field(default_factory=list)
    is_known: bool = False
    """True if there is a record of the partition."""
    loaded_s: Mapping[str, float] = field(default_factory=dict)
    """Time at which each loader that has loaded a state began, by its instance."""

    def roll_back(self, place: Any, count: int) -> None:
        """Drop deliveries after a place.

        `count` is the number of messages before this place.
        """
        stretches = self.stretches
        while len(stretches) > 1 and stretches[-1].begun >= place:
            stretches.pop()
        last = stretches[-1]
        last.reached, last.stop = place, max(last.start, min(last.stop, count))


def check_live(attempts: Sequence[JobAttempt], result: Audit) -> None:
    """Check the attempts of a live stream, in the order of time."""
    loaded_s = _loading_times(attempts)
    partitions = [_PartitionRead(n, loaded_s=loaded_s) for n in range(attempts[0].first["partitions"])]
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
    _prove(loader, proven, result)


def _loading_times(attempts: Sequence[JobAttempt]) -> dict[str, float]:
    """Times at which the loaders with a loaded state began, by instance."""
    times: dict[str, float] = {}
    for record in (record for attempt in attempts for records in attempt.ranks.values() for record in records):
        if record["resumed"]:
            times[record["instance"]] = min(record["started_s"], times.get(record["instance"], record["started_s"]))
    return times


def _records(attempt: JobAttempt, partition: int) -> list[tuple[int, AuditLine]]:
    """Records of a partition, by their start."""
    found = [
        (rank, record) for rank, records in attempt.ranks.items() for record in records
        if record["partition"] == partition
    ]  # fmt: skip
    return sorted(found, key=lambda each: (each[1]["places"], each[0]))


def _add(read: _PartitionRead, attempt: JobAttempt, rank: int, record: AuditLine, result: Audit) -> None:
    """Add a record; a start at a wrong place is a fault."""
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


def _goes_back(read: _PartitionRead, attempt: JobAttempt, record: AuditLine, last: _Stretch) -> bool:
    """True if a record begins at an earlier state.

    The model was then rolled back to that state, too.
    """
    if last.attempt is attempt:
        return False  # another rank has read the partition, too
    is_new_run = record["instance"] != last.instance and record["places"][0] == read.stretches[0].begun
    # A partition that was not read in the epoch of the state has its first record in a later one.
    loaded_since = last.attempt.seen_s <= read.loaded_s.get(record["instance"], 0.0)
    return bool(record["resumed"] or is_new_run or loaded_since)


def _who(rank: int, record: AuditLine, last: _Stretch) -> str:
    if last.rank != rank:
        return f"by ranks {last.rank} and {rank}"
    if last.instance == record["instance"]:
        return f"by rank {rank} again"
    return f"rank {rank} began at a committed place, without a state"
