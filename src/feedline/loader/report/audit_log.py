"""Audit log: the delivered positions of one rank, exact at every moment.

The file has records of `RECORD_NBYTES`, each one line of JSON padded with spaces. The record of the current span is
written again with each batch, so a killed process loses nothing, and an epoch needs one record. Records do
not cross pages of memory: a kill never leaves half of one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.cursor import Cursor, PartitionCursor
from feedline.core.live import is_live
from feedline.core.rng import derive_each
from feedline.core.schedule import BatchSchedule, PartitionSchedule, Schedule, Share
from feedline.errors import ArgumentError

_log = logging.getLogger("feedline")

RECORD_NBYTES = 1024

SUFFIX = ".audit"
"""Ending of an audit log, after the path of its run log."""

_MASK = (1 << 64) - 1


_SPREAD = np.uint64(0xD1342543DE82EF95)
"""Odd multiplier that keeps pairs of small numbers apart (Steele and Vigna, "Computationally easy, spectrally good
multipliers for congruential pseudorandom number generators", 2021)."""


_MOST_RANGES = 4
"""Ranges delivered ahead that a record can hold; empty records hold the others."""


_PENDING = 64
"""Most batches that are not yet in the digest: their arrays stay in the cache of a CPU."""


def audit_path(path: str | os.PathLike[str]) -> Path:
    """The audit log next to a run log."""
    return Path(f"{os.fspath(path)}{SUFFIX}")


def power_sums(positions: NDArray[np.int64]) -> tuple[int, int, int, int]:
    """Count and sums of the first three powers of positions, modulo 2**64.

    They do not depend on the order, and those of parts add up to those of the whole.
    """
    first = positions.view(np.uint64)
    second = first * first
    return len(first), int(first.sum()), int(second.sum()), int((second * first).sum())


def added(sums: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    """Power sums of the union of two disjoint sets of positions."""
    return tuple((mine + theirs) & _MASK for mine, theirs in zip(sums, more, strict=True))


ZERO_SUMS = (0, 0, 0, 0)


def pair_digest(positions: NDArray[np.int64], indices: NDArray[np.int64]) -> int:
    """Sum of a hash of each position with its index, modulo 2**64."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        pairs = positions.view(np.uint64) * _SPREAD + indices.view(np.uint64)
    return int(derive_each((), pairs).sum())


def own_pairs(
    requests: Sequence[Any], share: Share, *, batches: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Positions and indices of a share's requests, without those that pad.

    With `batches`, a position is a whole batch, as for a batch sampler. The indices are then None, and also if one of
    them is not an integer.
    """
    positions, indices = [], []
    for request in requests:
        rows, mine = request.positions, request.indices
        if batches:  # the schedule has the number of the batch in the high bits
            rows, mine = range(rows.start >> 32, (rows.start >> 32) + 1), None
        if isinstance(mine, int | np.int64 | torch.Tensor):  # of a request without batching
            mine = np.array([int(mine)])
        # Not by the positions: in the first global batch, those that pad are positions of the batch, too.
        places = share.positions(request.start, len(rows))
        if isinstance(rows, range) and places[-1] < request.stop:
            positions.append(np.arange(rows.start, rows.stop, rows.step))
        else:
            own = np.array(places) < request.stop
            positions.append(np.array(rows)[own])
            mine = mine[own] if isinstance(mine, np.ndarray) else None
        indices.append(mine)
    if any(getattr(mine, "dtype", None) != np.int64 for mine in indices):
        return np.concatenate(positions), None
    return np.concatenate(positions), np.concatenate(indices)


@dataclass(slots=True)
class DeliveredRun:
    """Consecutive global batches of which this rank has delivered its rows."""

    start: int
    stop: int
    offset: int
    partition: int | None = None
    is_ahead: bool = False
    batches: int = 0
    is_even: bool = True
    """True if all batches but the last had full length."""
    ended: bool = False
    over: bool = False
    """True if the epoch of the rank has ended."""
    flushed_stop: int = 0
    """End of the part that is in the sums and the digest."""
    sums: tuple[int, ...] = ZERO_SUMS
    digest: int | None = 0
    """None if an index is not an integer."""
    pending: list[Any] = field(default_factory=list)
    head: bytes = b""
    places: tuple[Any, Any] | None = None
    """Start and end of the run of a live partition."""

    def flush(self, share: Share, *, batches: bool) -> None:
        """Add the pending requests to the sums and the digest."""
        if self.pending:
            positions, indices = own_pairs(self.pending, share, batches=batches)
            self.sums = added(self.sums, power_sums(positions))
            if self.digest is not None:
                self.digest = None if indices is None else (self.digest + pair_digest(positions, indices)) & _MASK
        self.flushed_stop = self.stop
        self.pending.clear()

    def absorb(self, following: DeliveredRun) -> None:
        """Add the run that begins where this one ends."""
        self.is_even = self.is_even and following.is_even
        self.stop, self.flushed_stop = following.stop, following.stop
        self.batches += following.batches
        self.sums = added(self.sums, following.sums)
        both = self.digest, following.digest
        self.digest = None if both[0] is None or both[1] is None else (both[0] + both[1]) & _MASK


class AuditLog:
    """Writer of the audit log for one iteration of a loader.

    A failure to write is logged once and ends the log, but not the run.
    """

    def __init__(
        self, path: Path, identity: dict[str, Any], plan: Any, dataset: Any, *, resumed: bool, stops: bool = False
    ) -> None:
        self._path = path
        self._fixed = _fixed_fields(identity, plan)
        self._stops = stops
        """True if the epoch ends for all ranks with the first one that has no batch left."""
        self._live = dataset if is_live(dataset) else None
        self.unwritten_resume = resumed
        """True if a state was loaded, and no record says so yet."""
        self._each, self._batches = self._fixed["batch"], self._fixed["unit"] == "batch"
        self._share = getattr(plan.schedule, "share", Share())
        self._mine = frozenset(getattr(plan.schedule, "mine", ()))
        self._runs: list[DeliveredRun] = []
        self._free: list[int] = []
        self._prefix = b""
        self._fd = -1
        self._failed = False

    def add(self, request: Any, cursor: Cursor | PartitionCursor, mark: Any) -> None:
        """Record a batch; `cursor` is the cursor before its delivery."""
        if self._failed:
            return
        try:
            if self._fd < 0:
                self._open(cursor)
            if isinstance(cursor, Cursor):
                self._add_positions(request, cursor)
            else:
                self._add_samples(request.partition, cursor.mark(request.partition), mark)
        except OSError as error:
            self._fail(error)

    def flush(self, *, ended: bool = False) -> None:
        """Complete sums and digests; with `ended`, close the records of the epoch.

        A partition may go on after the epoch of its rank: only its mark says that it has ended.
        """
        if self._failed or self._fd < 0:
            return
        try:
            for run in self._runs:
                run.over = ended
                run.ended = run.ended or (ended and run.partition is None)
                run.flush(self._share, batches=self._batches)
                self._write(run)
        except OSError as error:
            self._fail(error)
        if ended:
            self._close()
            self._fd, self._runs, self._free = -1, [], []

    def _fail(self, error: OSError) -> None:
        self._failed = True
        _log.warning("the audit log %s ends here: %s", self._path, error)

    def _add_positions(self, request: Any, cursor: Cursor) -> None:
        start, stop = request.start, request.stop
        if start == stop:
            return
        runs = self._runs
        run = runs[0] if len(runs) == 1 and runs[0].stop == start else None
        if run is None:
            run = next((each for each in runs if each.stop == start), None)
        if run is None:
            run = self._begin(start, is_ahead=start > cursor.position)
        if run.is_even and (run.stop - run.start) % self._each:
            run.is_even, run.head = False, b""
        run.stop, run.batches = stop, run.batches + 1
        run.pending.append(request)
        if len(run.pending) >= _PENDING:
            run.flush(self._share, batches=self._batches)
            run.head = b""
        if len(runs) > 1:
            self._join(run)
        if run.head:
            self._put(run.offset + len(run.head), _TAIL % (run.stop, run.batches))
        else:
            self._write(run)

    def _join(self, run: DeliveredRun) -> None:
        """Absorb the run that begins where this one ends, delivered ahead."""
        following = next((other for other in self._runs if other.start == run.stop), None)
        if following is None:
            return
        for each in (run, following):
            each.flush(self._share, batches=self._batches)
        run.absorb(following)
        self._write(run)
        self._runs.remove(following)
        self._put(following.offset, _BLANK)
        self._free.append(following.offset)

    def _add_samples(self, partition: int, before: Any, mark: Any) -> None:
        run = next((run for run in self._runs if run.partition == partition), None)
        if run is None:
            run = self._begin(before.samples, partition=partition)
        if self._live is not None:
            begun = self._live.place_key(before.state[1]) if run.places is None else run.places[0]
            run.places = begun, self._live.place_key(mark.state[1])
        run.batches += mark.samples > run.stop
        run.stop, run.ended = max(run.stop, mark.samples), run.ended or mark.ended
        run.flushed_stop = run.stop
        self._write(run)

    def _begin(self, start: int, *, partition: int | None = None, is_ahead: bool = False) -> DeliveredRun:
        if self._free:
            offset = self._free.pop()
        else:  # appended by another descriptor: the loaders of a process share the file
            with self._path.open("ab", buffering=0) as end:
                end.write(_BLANK)
                offset = end.tell() - RECORD_NBYTES
        run = DeliveredRun(start, start, offset, partition, is_ahead, flushed_stop=start)
        self._runs.append(run)
        return run

    def _open(self, cursor: Cursor | PartitionCursor) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        self._fd = os.open(self._path, os.O_WRONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        self._close = weakref.finalize(self, os.close, self._fd)
        begun, already = (cursor.position, cursor.delivered_ahead) if isinstance(cursor, Cursor) else (0, ())
        fields = {**self._fixed, "epoch": cursor.epoch, "begun": begun}
        if self._stops:
            fields["stops"] = True
        if self._live is not None:
            fields["resumed"], self.unwritten_resume = self.unwritten_resume, False
        for first in range(_MOST_RANGES, len(already), _MOST_RANGES):
            self._set_prefix(fields, already[first : first + _MOST_RANGES])
            self._write(self._begin(begun))
        self._runs.clear()
        self._set_prefix(fields, already[:_MOST_RANGES])
        if isinstance(cursor, PartitionCursor):
            for partition, mark in cursor.marks:
                if partition in self._mine:
                    self._add_samples(partition, mark, mark)

    def _set_prefix(self, fields: dict[str, Any], already: Sequence[tuple[int, int]]) -> None:
        self._prefix = json.dumps({**fields, "already": already})[:-1].encode()

    def _write(self, run: DeliveredRun) -> None:
        """Write a whole record.

        Its last fields change with each batch, and are then written alone.
        """
        fields = {
            "partition": run.partition, "ahead": run.is_ahead, "even": run.is_even, "ended": run.ended,
            "over": run.over, "start": run.start, "settled": run.flushed_stop, "sums": run.sums, "digest": run.digest,
            "seen_s": round(time.time(), 3), **({} if run.places is None else {"places": run.places}),
        }  # fmt: skip
        run.head = b"%b, %b, " % (self._prefix, json.dumps(fields)[1:-1].encode())
        record = run.head + _TAIL % (run.stop, run.batches)
        self._put(run.offset, record.ljust(RECORD_NBYTES - 1) + b"\n")

    def _put(self, offset: int, content: bytes) -> None:
        os.lseek(self._fd, offset, os.SEEK_SET)
        os.write(self._fd, content)


_TAIL = b'"stop": %d, "batches": %d}'


_BLANK = b" " * (RECORD_NBYTES - 1) + b"\n"


def _fixed_fields(identity: dict[str, Any], plan: Any) -> dict[str, Any]:
    """The fields that are equal in all records of an iteration."""
    schedule = plan.schedule
    share = getattr(schedule, "share", Share())
    rank, world_size = identity["rank"], identity["world_size"]
    alone = world_size > 1 and not isinstance(schedule, PartitionSchedule) and share.world_size == 1
    return {
        "event": "span", "loader": identity["loader"][:60] + (f" of rank {rank}" if alone else ""),
        "rank": 0 if alone else rank, "world_size": 1 if alone else world_size,
        "instance": identity["instance"], "pid": identity["pid"], "host": identity["host"][:40],
        "process": identity["process"],
        "started_s": round(time.time(), 6),
        "order": order_digest(plan), "unit": _UNITS[type(schedule)], "in_order": identity["settings"]["in_order"],
        "length": epoch_length(plan), "partitions": getattr(schedule, "partitions", None),
        "batch": schedule.global_batch_size if isinstance(schedule, Schedule) else share.world_size,
        "strided": share.strided or getattr(schedule, "stride", (0, 1))[1] > 1,
        "pad": share.pad, "drop_last": bool(getattr(schedule, "drop_last", False)),
    }  # fmt: skip


_UNITS = {Schedule: "sample", BatchSchedule: "batch", PartitionSchedule: "partition"}


def order_digest(plan: Any) -> str:
    """Short digest of a plan's dataset and order."""
    return hashlib.blake2b(json.dumps(plan.fingerprint.to_json()).encode(), digest_size=8).hexdigest()


def epoch_length(plan: Any) -> int | None:
    """Positions per epoch; None for streams and endless samplers."""
    try:
        return len(plan.sampler)
    except Exception:  # noqa: BLE001 - whatever a sampler of the user's raises, its length is unknown
        return None


def read_audit_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of an audit log, in the order of the file.

    Raises `ArgumentError` for a line that is none: without it, the log proves nothing.
    """
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or record.get("event") != "span":
                raise ArgumentError(
                    f"{path}, line {number}: no record of an audit log. The file is damaged, or another one: pass the"
                    " logs of DataLoader(log='run.jsonl') or FEEDLINE_LOG=run.jsonl"
                )
            records.append(record)
    return records
