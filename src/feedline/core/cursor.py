"""The position of the training loop: the state of a loader."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

PositionRange = tuple[int, int]


class Cursor(NamedTuple):
    """The delivered positions of a map-style dataset.

    Everything below `position` was delivered, and above it exactly the ranges of `delivered_ahead`: disjoint,
    ascending, half-open, not adjacent to `position`. Such ranges exist only if batches are delivered out of order.
    Positions count in the global order of `epoch`, over all ranks.
    """

    epoch: int = 0
    position: int = 0
    delivered_ahead: tuple[PositionRange, ...] = ()

    def after(self, start: int, stop: int) -> Cursor:
        """The cursor after the delivery of [start, stop)."""
        if start == stop:
            return self
        if start == self.position and not self.delivered_ahead:  # in order: the usual case
            # the constructor of tuple takes a third of the time of the named tuple's
            return tuple.__new__(Cursor, (self.epoch, stop, ()))
        position, delivered_ahead = self.position, []
        for low, high in _merge([*self.delivered_ahead, (start, stop)]):
            if low <= position:
                position = max(position, high)
            else:
                delivered_ahead.append((low, high))
        return Cursor(self.epoch, position, tuple(delivered_ahead))

    def next_epoch(self) -> Cursor:
        """The start of the epoch after this one."""
        return Cursor(self.epoch + 1)

    def gaps(self, stop: int) -> list[PositionRange]:
        """The undelivered ranges below `stop`, ascending."""
        gaps, low = [], self.position
        for start, end in self.delivered_ahead:
            if low < min(start, stop):
                gaps.append((low, min(start, stop)))
            low = end
        if low < stop:
            gaps.append((low, stop))
        return gaps


def _merge(ranges: list[PositionRange]) -> list[PositionRange]:
    merged: list[PositionRange] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


@dataclass(frozen=True, slots=True)
class PartitionOffset:
    """The delivered part of one partition of an iterable dataset.

    `samples` counts the samples of the delivered batches. `state` is the dataset's own `state_dict()` at that point, or
    None.
    """

    batches: int = 0
    samples: int = 0
    state: Any = None
    ended: bool = False


_NOTHING = PartitionOffset()


def state_of_dataset(state: Any) -> Any:
    """The part of `StreamSource.state_dict()` that outlives an epoch, or None.

    The state of an iterator ends with its epoch, unless the iterator is the dataset.
    """
    if not state:
        return None
    return state[1] if len(state) > 2 else state[0]


@dataclass(frozen=True, slots=True)
class PartitionCursor:
    """The delivered part of an iterable dataset: an offset for each partition."""

    epoch: int = 0
    marks: tuple[tuple[int, PartitionOffset], ...] = ()
    """By partition, ascending; those of which nothing was delivered are left out."""
    next_partition: int = 0
    step: int = 0
    """Batches that the loop has received in the epoch, with those before a resume."""
    continues: bool = False
    """True if an epoch begins where the loop left the previous one: the marks then count all epochs."""
    dataset_states: tuple[tuple[int, Any], ...] = field(default=(), compare=False)
    """By partition, the states of datasets that workers have kept since the previous epoch."""

    def mark(self, partition: int) -> PartitionOffset:
        """The offset of `partition`; zero if nothing was delivered."""
        if len(self.marks) == 1 and self.marks[0][0] == partition:  # the usual case without workers
            return self.marks[0][1]
        place = self._place(partition)
        return self.marks[place][1] if self._has(partition, place) else _NOTHING

    def _place(self, partition: int) -> int:
        """The place of a partition in `marks`."""
        # Not a scan: a stream may have a hundred thousand partitions, and each batch asks for several marks.
        return bisect_left(self.marks, partition, key=itemgetter(0))

    def _has(self, partition: int, place: int) -> bool:
        return place < len(self.marks) and self.marks[place][0] == partition

    def after(
        self, partition: int, mark: PartitionOffset, next_partition: int, *, is_step: bool = True
    ) -> PartitionCursor:
        """The cursor after `partition` has reached `mark`.

        `is_step` is false if the loop receives no batch with it, as at the end of a partition.
        """
        marks: tuple[tuple[int, PartitionOffset], ...] = ((partition, mark),)
        if not (len(self.marks) == 1 and self.marks[0][0] == partition):
            place = self._place(partition)
            marks = (*self.marks[:place], *marks, *self.marks[place + self._has(partition, place) :])
        # `replace` takes three times as long.
        return PartitionCursor(
            self.epoch, marks, next_partition, self.step + is_step, self.continues, self.dataset_states
        )

    def ended(self) -> frozenset[int]:
        """The partitions that are exhausted."""
        return frozenset(partition for partition, mark in self.marks if mark.ended)

    @property
    def is_begun(self) -> bool:
        """True once a batch was delivered, or a partition has ended."""
        return self.next_partition > 0 or any(mark.batches or mark.ended for _, mark in self.marks)

    def next_epoch(self) -> PartitionCursor:
        """The start of the epoch after this one."""
        start = self.at_epoch(self.epoch + 1)
        if self.continues:
            return start
        kept = {partition: state_of_dataset(mark.state) for partition, mark in self.marks if mark.ended}
        datasets = {partition: (state, None) for partition, state in kept.items() if state is not None}
        return replace(start, dataset_states=tuple({**dict(self.dataset_states), **datasets}.items()))

    def with_initial_states(self, opened: Mapping[int, Any]) -> PartitionCursor:
        """Cursor with marks for partitions of which nothing was delivered.

        They hold the states in `opened`, by partition, else the dataset states. For workers that do not have them.
        """
        states = {**dict(self.dataset_states), **opened}
        marks = {partition: PartitionOffset(state=state) for partition, state in states.items()}
        return replace(
            self, marks=tuple(sorted({**marks, **dict(self.marks)}.items(), key=itemgetter(0))), dataset_states=()
        )

    def at_epoch(self, epoch: int) -> PartitionCursor:
        """The start of an epoch."""
        if not self.continues:
            return PartitionCursor(epoch)
        marks = tuple((partition, replace(mark, ended=False)) for partition, mark in self.marks)
        return PartitionCursor(epoch, marks, continues=True)
