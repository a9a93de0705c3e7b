"""Schedules: from a cursor to requests for batches.

The samples of a batch are a pure function of (seed, epoch, position).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, NamedTuple, Protocol

import numpy as np

from feedline.core.cursor import Cursor, PartitionCursor, PartitionOffset
from feedline.core.tensors import as_yielded
from feedline.errors import ArgumentError

LOOKAHEAD = 1 << 14
"""Positions read from a pure sampler at once.

Many batches share the cost of a call.
"""


class InitialStates(NamedTuple):
    """States to restore before the first batch of a resumed run.

    They are the result of its builder's `capture()`.
    """

    latest: bytes | None
    """After the last delivered batch; None to keep the current state."""
    start: bytes | None = None
    """State at the start of the epoch, from which a partition is replayed; None for the state of a new worker."""


def epoch_of(request: Any) -> tuple[int, int]:
    """Run and epoch of a request; requests of samples have no run."""
    return getattr(request, "run", 0), request.epoch


class BatchRequest(NamedTuple):
    """All that a worker needs to build one batch.

    Equal requests give equal batches, in any process, at any time. `start` and `stop` bound the global batch; `indices`
    and `positions` are this rank's rows of it. For batch samplers one position is one whole batch, and `positions`
    holds that position in its high bits.
    """

    epoch: int
    number: int
    start: int
    stop: int
    indices: Any
    positions: Sequence[int]
    seed: int | None
    initial_states: InitialStates | None = None

    @property
    def partition(self) -> None:
        """None: any worker may build the batch."""
        return

    @property
    def turn(self) -> int:
        """Number whose remainder by the worker count selects the worker.

        It is used if workers take turns, as torch's do.
        """
        return self.number

    def part(self, rows: Sequence[int]) -> BatchRequest:
        """The same request with these rows only."""
        indices, positions = as_yielded(self.indices), self.positions
        return self._replace(indices=[indices[row] for row in rows], positions=[positions[row] for row in rows])

    def without(self, rows: Container[int]) -> BatchRequest:
        """The same request without these rows."""
        return self.part([row for row in range(len(self.positions)) if row not in rows])

    def advance(self, cursor: Cursor, _: PartitionOffset | None, __: bool = True) -> tuple[Cursor, int]:
        """The cursor after delivery, and the number of samples."""
        return cursor.after(self.start, self.stop), len(self.positions)

    def __str__(self) -> str:
        return f"batch {self.number} of epoch {self.epoch} (positions {self.start} to {self.stop - 1})"


class PartitionRequest(NamedTuple):
    """The next batch of one partition of an iterable dataset.

    A worker that has not opened the partition starts at `mark`.
    """

    epoch: int
    number: int
    partition: int
    partitions: int
    mark: PartitionOffset
    seed: int | None
    initial_states: InitialStates | None = None
    stride: tuple[int, int] = (0, 1)
    """(rank, world_size): with several ranks, each reads the whole partition and keeps every world_size-th sample.

    Marks then count the samples of all ranks.
    """
    continues: bool = False
    """True for a live stream: a batch that was built cannot be built again, and must not be built twice."""
    run: int = 0
    """Number of the iteration that sends the request. A worker may outlive an iteration, and may still have the same
    partition of the same epoch open at another place or with another number of partitions. Therefore, each iteration
    opens its own.
    """

    @property
    def turn(self) -> int:
        """Number whose remainder by the worker count selects the worker."""
        return self.partition

    def advance(
        self, cursor: PartitionCursor, mark: PartitionOffset | None, is_step: bool = True
    ) -> tuple[PartitionCursor, int]:
        """The cursor after delivery up to `mark`, and the number of samples.

        `is_step` is false for an answer without a batch.
        """
        assert mark is not None
        samples = (mark.samples - cursor.mark(self.partition).samples) // self.stride[1]
        following = (self.partition + 1) % self.partitions
        return cursor.after(self.partition, mark, following, is_step=is_step), samples

    def opened_at(self, mark: PartitionOffset) -> PartitionRequest:
        """The same request for a worker that begins at `mark`."""
        return self._replace(mark=mark)

    def __str__(self) -> str:
        return f"batch {self.number} of partition {self.partition} of {self.partitions} (epoch {self.epoch})"


_Walk = Generator[BatchRequest, None, bool]
"""Requests of one span of an epoch; returns True if the epoch ended in it."""


class IndexSource(Protocol):
    """An order of indices, as a schedule reads it."""

    def take(self, epoch: int, start: int, stop: int) -> Sequence[Any]:
        """The indices at positions [start, stop), fewer where the epoch ends."""


class ForeignSource(IndexSource, Protocol):
    """A sampler without random access, read only as far as needed."""

    def forget(self, before: int) -> None:
        """Free the positions below `before`."""


class BatchSource(Protocol):
    """An order of batches, as a schedule reads it."""

    def take_batches(self, epoch: int, start: int, stop: int) -> Sequence[Any]:
        """The batches [start, stop) of the epoch, fewer where it ends."""


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of each global batch that one rank takes.

    `strided` gives rank r the rows r, r + world_size, ..., as torch's DistributedSampler; otherwise one contiguous run.
    `pad` completes the last batch of each rank with the epoch's first positions; without it, the ranks' last batches
    are cut to the same length.
    """

    rank: int = 0
    world_size: int = 1
    strided: bool = False
    pad: bool = True

    def rows_each(self, rows: int) -> int:
        """Rows per rank of a global batch of `rows` rows."""
        return -(-rows // self.world_size) if self.pad else rows // self.world_size

    def positions(self, start: int, each: int) -> range:
        """The rank's positions in the global batch that begins at `start`.

        They may be past the end of the epoch.
        """
        if self.strided:
            return range(start + self.rank, start + self.rank + each * self.world_size, self.world_size)
        first = start + self.rank * each
        return range(first, first + each)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of a map-style dataset with a sampler of indices.

    `batch_size` counts rows per rank. `batched=False` requests single indices (torch's `batch_size=None`). With
    `lookahead=0` no position is read before its batch is due, as foreign samplers need.
    """

    source: IndexSource | ForeignSource
    batch_size: int = 1
    batched: bool = True
    drop_last: bool = False
    share: Share = Share()
    seed: int | None = None
    lookahead: int = LOOKAHEAD
    forgets_delivered: bool = False
    """True if the source may free indices before the cursor."""
    batches: Any = None
    """torch's BatchSampler, whose `batch_size` may change during an epoch; None if the size is fixed."""

    @property
    def global_batch_size(self) -> int:
        """Positions per global batch."""
        return self.batch_size * self.share.world_size

    def length(self, samples: int) -> int:
        """Batches per epoch of `samples` samples."""
        full, rest = divmod(samples, self.global_batch_size)
        return full + (self._tail_rows(rest) > 0)

    def requests(self, cursor: Cursor) -> Iterator[BatchRequest]:
        """The remaining requests of the cursor's epoch, in order."""
        walk = self._walk_alone if self.share.world_size == 1 else self._walk_share
        # The usual walk without a generator around it, through which each batch would pass.
        return self._walk_around(cursor, walk) if cursor.delivered_ahead else walk(cursor.epoch, cursor.position, None)

    def _walk_around(self, cursor: Cursor, walk: Callable[[int, int, int | None], _Walk]) -> Iterator[BatchRequest]:
        """The requests before, between and after the ranges that were delivered ahead."""
        delivered_ahead = iter((*cursor.delivered_ahead, None))
        position = cursor.position
        for range_ahead in delivered_ahead:
            ended = yield from walk(cursor.epoch, position, None if range_ahead is None else range_ahead[0])
            if ended or range_ahead is None:
                return
            position = range_ahead[1]

    def _walk_alone(self, epoch: int, position: int, limit: int | None) -> _Walk:
        seed, batched, batches = self.seed, self.batched, self.batches
        size = self.batch_size if batches is None else batch_size_of(batches)
        # Rounded up: a state of another batch size may end within a batch of this size; the number of that batch
        # counts.
        number = -(-position // size)
        while limit is None or position < limit:
            ahead = max(size, self.lookahead // size * size)
            stop = position + ahead if limit is None else min(limit, position + ahead)
            block = self.source.take(epoch, position, stop)
            if self.forgets_delivered:
                self.source.forget(position)  # type: ignore[union-attr]
            for offset in range(0, len(block), size):
                start = position + offset
                indices = block[offset : offset + size]
                rows = len(indices)
                # A short batch up to a range delivered ahead fills a gap: it is not the last one of the epoch.
                if rows < size and self.drop_last and start + rows != limit:
                    return True
                if not batched:
                    indices = _bare(indices)
                # the constructor of tuple takes a third of the time of the named tuple's, and every batch passes here
                yield tuple.__new__(
                    BatchRequest, (epoch, number, start, start + rows, indices, range(start, start + rows), seed, None)
                )
                number += 1
                if batches is not None and batches.batch_size != size:  # as in torch: from the next batch on
                    size, position = batch_size_of(batches), start + rows
                    break
            else:
                if len(block) < stop - position:
                    return True
                position = stop
        return False

    def _walk_share(self, epoch: int, position: int, limit: int | None) -> _Walk:
        share, size = self.share, self.global_batch_size
        number = -(-position // size)
        if limit is not None:  # a gap below a range delivered ahead: a gap of any size must be delivered completely
            share = replace(share, pad=True)
        while limit is None or position < limit:
            stop = position + size if limit is None else min(limit, position + size)
            rows = self._rows_between(epoch, position, stop)
            short = rows < stop - position
            each = share.rows_each(rows) if limit is not None else self._tail_rows(rows)
            if each:
                places = share.positions(position, each)
                indices, positions = self._take_wrapped(
                    epoch, places, position + rows if short or rows < size else None
                )
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
        """The number of positions of [start, stop) that exist.

        The length of a foreign sampler may be wrong, so this reads its indices.
        """
        if not self.lookahead:
            return len(self.source.take(epoch, start, stop))
        if getattr(self.source, "length", 0) is None:  # endless
            return stop - start
        return max(0, min(stop, len(self.source)) - start)  # type: ignore[arg-type]

    def _take_wrapped(self, epoch: int, places: range, end: int | None) -> tuple[Any, Sequence[int]]:
        """Indices and positions at `places`.

        Positions at or past `end` wrap to the epoch's first ones.
        """
        if end is None or places[-1] < end:
            indices = self.source.take(epoch, places.start, places[-1] + 1)
            return indices[:: places.step], places
        positions = [place if place < end else (place - end) % end for place in places]
        rows = [self.source.take(epoch, position, position + 1) for position in positions]
        if all(isinstance(row, np.ndarray) for row in rows):
            return np.concatenate(rows), positions
        return [row[0] for row in rows], positions


def batch_size_of(batches: Any) -> int:
    """The batch size of a BatchSampler, which users may have set."""
    size = batches.batch_size
    try:
        if (number := operator.index(size)) >= 1:
            return number
    except TypeError:
        pass
    raise ArgumentError(f"batch_sampler.batch_size must be an integer >= 1; it was set to {size!r}")


def _bare(indices: Any) -> Any:
    """Single index of a request without batches, as the sampler yields it."""
    return as_yielded(indices[:1])[0]


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The schedule of a map-style dataset with a batch sampler.

    Rank r takes every world_size-th batch. An incomplete last round of ranks is dropped with `drop_last`, else
    completed with the epoch's first batches.
    """

    source: BatchSource
    share: Share = Share()
    seed: int | None = None
    drop_last: bool = False
    forgets_delivered: bool = False
    """True if the source may free items before the cursor."""

    def length(self, batches: int) -> int:
        """Batches per epoch and rank, of `batches` in all."""
        world_size = self.share.world_size
        return batches // world_size if self.drop_last else -(-batches // world_size)

    def requests(self, cursor: Cursor) -> Iterator[BatchRequest]:
        """The remaining requests of the cursor's epoch, in order."""
        world_size, epoch = self.share.world_size, cursor.epoch
        position = cursor.position
        delivered = list(cursor.delivered_ahead)
        while True:
            while delivered and delivered[0][0] <= position:
                position = delivered.pop(0)[1]
            stop = min(position + world_size, delivered[0][0]) if delivered else position + world_size
            batches = self.source.take_batches(epoch, position, stop)
            if self.forgets_delivered:
                self.source.forget(position)  # type: ignore[attr-defined]
            ended = len(batches) < stop - position
            if not batches or (self.drop_last and ended):
                return
            place, indices = self._mine(epoch, position, batches)
            # Batches differ in size, so a row has no position of its own: it gets a range that no other batch reaches.
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
    """The schedule of an iterable dataset: partitions take turns until they end.

    Without `in_order` a slow partition does not delay others: the next request goes to the partition with the fewest
    batches in flight.
    """

    partitions: int
    own_partitions: tuple[int, ...]
    seed: int | None = None
    in_order: bool = True
    stride: tuple[int, int] = (0, 1)
    """See `PartitionRequest.stride`."""
    continues: bool = False
    """See `PartitionRequest.continues`. The partition with the oldest request is next."""
    owner: tuple[int | None, int] = (0, 1)
    """Rank and world size. The rank is None if each rank reads all partitions, so that all have the same state."""

    def requests(
        self, cursor: PartitionCursor, progress: Callable[[], PartitionCursor], run: int = 0
    ) -> Iterator[PartitionRequest]:
        """Requests from `cursor` on.

        `progress()` returns the cursor of the loop, which moves as batches are delivered. `run` is the field of
        `PartitionRequest`.
        """
        numbers = dict.fromkeys(self.own_partitions, 0)
        numbers |= {partition: mark.batches for partition, mark in cursor.marks}
        if self.continues:
            partitions = self._rested(numbers, progress)
        elif self.in_order:
            partitions = self._in_turn(cursor.next_partition, progress)
        else:
            partitions = self._least_busy(numbers, progress)
        for partition in chain(self._to_restore(cursor), partitions):
            # The constructor of tuple takes a third of the time of the named tuple's constructor.
            yield tuple.__new__(PartitionRequest, (
                cursor.epoch, numbers[partition], partition, self.partitions, progress().mark(partition), self.seed,
                None, self.stride, self.continues, run,
            ))  # fmt: skip
            numbers[partition] += 1

    def _to_restore(self, cursor: PartitionCursor) -> list[int]:
        """Partitions that ended before the cursor and left a dataset state.

        The first request to each loads that state into its dataset.
        """
        ended = {partition for partition, mark in cursor.marks if mark.ended and mark.state is not None}
        return [partition for partition in self.own_partitions if partition in ended]

    def _in_turn(self, first: int, progress: Callable[[], PartitionCursor]) -> Iterator[int]:
        if len(self.own_partitions) == 1:
            (only,) = self.own_partitions
            while not progress().mark(only).ended:
                yield only
            return
        turns = tuple(partition for partition in self.own_partitions if partition >= first)
        # Called before each turn, because only a delivered batch shows that its partition has ended.
        while not progress().ended().issuperset(self.own_partitions):
            for partition in turns:
                if not progress().mark(partition).ended:
                    yield partition
            turns = self.own_partitions

    def _rested(self, numbers: dict[int, int], progress: Callable[[], PartitionCursor]) -> Iterator[int]:
        """Partitions with the fewest requests in flight, in turns."""
        asked = dict.fromkeys(self.own_partitions, 0)
        for turn in count(1):
            delivered = progress()
            live = [partition for partition in self.own_partitions if not delivered.mark(partition).ended]
            if not live:
                return
            chosen = min(live, key=lambda p: (numbers[p] - delivered.mark(p).batches, asked[p]))
            asked[chosen] = turn
            yield chosen

    def _least_busy(self, numbers: dict[int, int], progress: Callable[[], PartitionCursor]) -> Iterator[int]:
        while live := [partition for partition in self.own_partitions if not progress().mark(partition).ended]:
            delivered = progress()
            yield min(live, key=lambda partition: numbers[partition] - delivered.mark(partition).batches)
