"""Cursor in, batch requests out: which samples make up which batch, as a pure function of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np

from feedline.core.cursor import Cursor, PartitionCursor, PartitionOffset

LOOKAHEAD = 1 << 14
"""Positions that are asked of a pure sampler at once: their cost is shared by many batches."""


class BatchRequest(NamedTuple):
    """Everything a worker needs to build one batch; equal requests give equal batches, anywhere and at any time.

    `start` and `stop` bound the global batch; `indices` and `positions` are this rank's rows of it. For batch
    samplers one position is one whole batch, and `positions` holds that position in its high bits.
    """

    epoch: int
    number: int
    start: int
    stop: int
    indices: Any
    positions: Sequence[int]
    seed: int | None

    @property
    def partition(self) -> None:
        """None: any worker may build it."""
        return

    @property
    def turn(self) -> int:
        """Number that decides, modulo the number of workers, whose batch it is where torch's workers take turns."""
        return self.number

    def part(self, rows: Sequence[int]) -> BatchRequest:
        """The same request with these rows only."""
        indices, positions = self.indices, self.positions
        return self._replace(indices=[indices[row] for row in rows], positions=[positions[row] for row in rows])

    def without(self, rows: Container[int]) -> BatchRequest:
        """The same request with these rows left out."""
        return self.part([row for row in range(len(self.positions)) if row not in rows])

    def advance(self, cursor: Cursor, _: PartitionOffset | None) -> tuple[Cursor, int]:
        """The cursor once this batch was delivered, and how many samples it has."""
        return cursor.after(self.start, self.stop), len(self.positions)

    def __str__(self) -> str:
        return f"batch {self.number} of epoch {self.epoch} (positions {self.start} to {self.stop - 1})"


class PartitionRequest(NamedTuple):
    """Next batch of one partition of an iterable dataset; a worker without it starts at `mark`."""

    epoch: int
    number: int
    partition: int
    partitions: int
    mark: PartitionOffset
    seed: int | None

    @property
    def turn(self) -> int:
        """Number that decides, modulo the number of workers, whose batch it is: that of its partition."""
        return self.partition

    def advance(self, cursor: PartitionCursor, mark: PartitionOffset | None) -> tuple[PartitionCursor, int]:
        """The cursor once this batch, with `mark` behind it, was delivered, and how many samples it has."""
        assert mark is not None
        samples = mark.samples - cursor.mark(self.partition).samples
        return cursor.after(self.partition, mark, (self.partition + 1) % self.partitions), samples

    def __str__(self) -> str:
        return f"batch {self.number} of partition {self.partition} of {self.partitions} (epoch {self.epoch})"


_Walk = Generator[BatchRequest, None, bool]
"""Requests of one stretch of an epoch; in the end, whether the epoch ended with it."""


class IndexSource(Protocol):
    """An order: a sampler seen by the schedule."""

    def take(self, epoch: int, start: int, stop: int) -> Sequence[Any]:
        """The indices at positions [start, stop), fewer where the epoch ends."""


class ForeignSource(IndexSource, Protocol):
    """A sampler of somebody else's, listed as it yields."""

    def forget(self, before: int) -> None:
        """Free what was kept of the positions below `before`."""


class BatchSource(Protocol):
    """An order of ready-made batches: a batch sampler seen by the schedule."""

    def take_batches(self, epoch: int, start: int, stop: int) -> Sequence[Any]:
        """The batches at batch positions [start, stop), fewer where the epoch ends."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which rows of each global batch are this rank's, and what becomes of an incomplete last one.

    `strided` gives rank r the rows r, r + world_size, ... (torch's DistributedSampler), else one contiguous run.
    `pad` completes the ranks of the last batch with the epoch's first positions; without it they are cut short.
    """

    rank: int = 0
    world_size: int = 1
    strided: bool = False
    pad: bool = True

    def rows_each(self, rows: int) -> int:
        """How many rows every rank gets of a global batch of `rows` rows."""
        return -(-rows // self.world_size) if self.pad else rows // self.world_size

    def positions(self, start: int, each: int) -> range:
        """The rank's positions in the global batch that begins at `start`; past the end of the epoch they wrap."""
        if self.strided:
            return range(start + self.rank, start + self.rank + each * self.world_size, self.world_size)
        first = start + self.rank * each
        return range(first, first + each)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan of a map-style dataset whose sampler gives single indices.

    `batch_size` counts rows per rank; `batched=False` hands out bare indices (torch's `batch_size=None`).
    `lookahead=0` asks the source for no position before its batch is due: for foreign samplers.
    """

    source: IndexSource | ForeignSource
    batch_size: int = 1
    batched: bool = True
    drop_last: bool = False
    share: Share = Share()
    seed: int | None = None
    lookahead: int = LOOKAHEAD

    @property
    def span(self) -> int:
        """Positions that one global batch covers."""
        return self.batch_size * self.share.world_size

    def length(self, samples: int) -> int:
        """Batches per epoch of this many samples."""
        full, rest = divmod(samples, self.span)
        return full + (self._tail_rows(rest) > 0)

    def requests(self, cursor: Cursor) -> Iterator[BatchRequest]:
        """What remains of the cursor's epoch, in order."""
        walk = self._alone if self.share.world_size == 1 else self._shared
        delivered_ahead = iter((*cursor.delivered_ahead, None))
        position = cursor.position
        for range_ahead in delivered_ahead:
            ended = yield from walk(cursor.epoch, position, None if range_ahead is None else range_ahead[0])
            if ended or range_ahead is None:
                return
            position = range_ahead[1]

    def _alone(self, epoch: int, position: int, limit: int | None) -> _Walk:
        size, seed, batched = self.batch_size, self.seed, self.batched
        number = -(-position // size)
        ahead = max(size, self.lookahead // size * size)
        while limit is None or position < limit:
            stop = position + ahead if limit is None else min(limit, position + ahead)
            block = self.source.take(epoch, position, stop)
            if not self.lookahead:
                self.source.forget(position)  # type: ignore[union-attr]
            for offset in range(0, len(block), size):
                start = position + offset
                indices = block[offset : offset + size]
                rows = len(indices)
                if rows < size and self.drop_last and start + rows != limit:
                    return True
                if not batched:
                    indices = _bare(indices)
                # tuple's own constructor: a third of the cost, and every batch passes here
                yield tuple.__new__(
                    BatchRequest, (epoch, number, start, start + rows, indices, range(start, start + rows), seed)
                )
                number += 1
            if len(block) < stop - position:
                return True
            position = stop
        return False

    def _shared(self, epoch: int, position: int, limit: int | None) -> _Walk:
        share, size = self.share, self.span
        number = -(-position // size)
        if limit is not None:  # a gap below an range delivered ahead: whatever its size, nothing of it may be dropped
            share = replace(share, pad=True)
        while limit is None or position < limit:
            stop = position + size if limit is None else min(limit, position + size)
            rows = self._rows_between(epoch, position, stop)
            short = rows < stop - position
            each = share.rows_each(rows) if limit is not None else self._tail_rows(rows)
            if each:
                places = share.positions(position, each)
                indices, positions = self._wrapped(epoch, places, position + rows if short or rows < size else None)
                indices = indices if self.batched else _bare(indices)
                yield BatchRequest(epoch, number, position, position + rows, indices, positions, self.seed)
            if short or not rows:
                return True
            number, position = number + 1, stop
        return False

    def _tail_rows(self, rows: int) -> int:
        each = self.share.rows_each(rows)
        return 0 if self.drop_last and each < self.batch_size else each

    def _rows_between(self, epoch: int, start: int, stop: int) -> int:
        """How many of the positions [start, stop) exist; a foreign sampler's length is not trusted."""
        if self.lookahead:
            return max(0, min(stop, len(self.source)) - start)  # type: ignore[arg-type]
        return len(self.source.take(epoch, start, stop))

    def _wrapped(self, epoch: int, places: range, end: int | None) -> tuple[Any, Sequence[int]]:
        """Indices and positions at `places`; those at or past `end` start again from the epoch's first position."""
        if end is None or places[-1] < end:
            found = self.source.take(epoch, places.start, places[-1] + 1)
            return found[:: places.step], places
        positions = [place if place < end else (place - end) % end for place in places]
        rows = [self.source.take(epoch, position, position + 1) for position in positions]
        if all(isinstance(row, np.ndarray) for row in rows):
            return np.concatenate(rows), positions
        return [row[0] for row in rows], positions


def _bare(indices: Any) -> Any:
    """The one index of a request without batches: a Python integer where the order is of integers."""
    return indices[0].item() if isinstance(indices, np.ndarray) else indices[0]


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The plan of a map-style dataset whose batch sampler gives whole batches: rank r takes every world_size-th.

    An incomplete last round of ranks is dropped with `drop_last`, else completed with the epoch's first batches.
    """

    source: BatchSource
    share: Share = Share()
    seed: int | None = None
    drop_last: bool = False
    forgets: bool = False
    """Whether the source may free what lies before the cursor: a foreign sampler that is listed as it yields."""

    def length(self, batches: int) -> int:
        """Batches per epoch and rank, of this many batches in all."""
        world_size = self.share.world_size
        return batches // world_size if self.drop_last else -(-batches // world_size)

    def requests(self, cursor: Cursor) -> Iterator[BatchRequest]:
        """What remains of the cursor's epoch, in order."""
        world_size, epoch = self.share.world_size, cursor.epoch
        position = cursor.position
        delivered = list(cursor.delivered_ahead)
        while True:
            while delivered and delivered[0][0] <= position:
                position = delivered.pop(0)[1]
            stop = min(position + world_size, delivered[0][0]) if delivered else position + world_size
            batches = self.source.take_batches(epoch, position, stop)
            if self.forgets:
                self.source.forget(position)  # type: ignore[attr-defined]
            ended = len(batches) < stop - position
            if not batches or (self.drop_last and ended):
                return
            place, indices = self._mine(epoch, position, batches)
            rows = range(place << 32, (place << 32) + len(indices))
            stop = position + len(batches)
            yield BatchRequest(epoch, position // world_size, position, stop, indices, rows, self.seed)
            position = stop

    def _mine(self, epoch: int, position: int, batches: Sequence[Any]) -> tuple[int, Any]:
        rank = self.share.rank
        if rank < len(batches):
            return position + rank, batches[rank]
        end = position + len(batches)
        place = (rank - len(batches)) % end
        return place, self.source.take_batches(epoch, place, place + 1)[0]


@dataclass(frozen=True, slots=True)
class PartitionSchedule:
    """The plan of an iterable dataset: its partitions in turn, until each has ended.

    Without `in_order` a slow partition is not waited for: the next request goes to the partition with the fewest
    batches in flight.
    """

    partitions: int
    mine: tuple[int, ...]
    seed: int | None = None
    in_order: bool = True

    def requests(self, cursor: PartitionCursor, progress: Callable[[], PartitionCursor]) -> Iterator[PartitionRequest]:
        """Requests from `cursor` on; `progress()` tells, at each turn, what was delivered since."""
        numbers = {partition: cursor.mark(partition).batches for partition in self.mine}
        partitions = self._in_turn(cursor.turn, progress) if self.in_order else self._least_busy(numbers, progress)
        for partition in chain(self._to_restore(cursor), partitions):
            yield PartitionRequest(
                cursor.epoch, numbers[partition], partition, self.partitions, progress().mark(partition), self.seed
            )
            numbers[partition] += 1

    def _to_restore(self, cursor: PartitionCursor) -> list[int]:
        """Partitions that ended before the cursor and left a state for their dataset to continue with."""
        marks = ((partition, cursor.mark(partition)) for partition in self.mine)
        return [partition for partition, mark in marks if mark.ended and mark.state is not None]

    def _in_turn(self, turn: int, progress: Callable[[], PartitionCursor]) -> Iterator[int]:
        turns = tuple(partition for partition in self.mine if partition >= turn)
        while not progress().ended().issuperset(self.mine):
            for partition in turns:
                if not progress().mark(partition).ended:
                    yield partition
            turns = self.mine

    def _least_busy(self, numbers: dict[int, int], progress: Callable[[], PartitionCursor]) -> Iterator[int]:
        while live := [partition for partition in self.mine if not progress().mark(partition).ended]:
            delivered = progress()
            yield min(live, key=lambda partition: numbers[partition] - delivered.mark(partition).batches)
