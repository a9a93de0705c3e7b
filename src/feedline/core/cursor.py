"""What the training loop has received: the only state of a loader over a map-style dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Range = tuple[int, int]


class Cursor(NamedTuple):
    """Everything below `position` was delivered, and of what lies above it exactly the `delivered_ahead`.

    Positions count in the global order of `epoch`, over all ranks. Islands are disjoint, ascending, half-open
    ranges that do not touch `position`; they arise only from delivery out of order.
    """

    epoch: int = 0
    position: int = 0
    delivered_ahead: tuple[Range, ...] = ()

    def after(self, start: int, stop: int) -> Cursor:
        """The cursor once the range [start, stop) was delivered as well."""
        if start == stop:
            return self
        if start == self.position and not self.delivered_ahead:  # in order: the usual case, kept cheap
            return Cursor(self.epoch, stop)
        position, delivered_ahead = self.position, []
        for low, high in _merged([*self.delivered_ahead, (start, stop)]):
            if low <= position:
                position = max(position, high)
            else:
                delivered_ahead.append((low, high))
        return Cursor(self.epoch, position, tuple(delivered_ahead))

    def next_epoch(self) -> Cursor:
        """The start of the epoch after this one."""
        return Cursor(self.epoch + 1)

    def gaps(self, stop: int) -> list[Range]:
        """The ranges below `stop` that were not delivered yet, ascending."""
        gaps, low = [], self.position
        for start, end in self.delivered_ahead:
            if low < min(start, stop):
                gaps.append((low, min(start, stop)))
            low = end
        if low < stop:
            gaps.append((low, stop))
        return gaps


def _merged(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


@dataclass(frozen=True, slots=True)
class PartitionOffset:
    """How far one partition of an iterable dataset was delivered.

    `samples` counts the samples drawn for the delivered batches; `state` is the dataset's own `state_dict()` at that
    point, None where it has none.
    """

    batches: int = 0
    samples: int = 0
    state: Any = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class PartitionCursor:
    """What the loop has received of an iterable dataset: a mark for each partition, and whose turn is next."""

    epoch: int = 0
    marks: tuple[tuple[int, PartitionOffset], ...] = ()
    turn: int = 0

    def mark(self, partition: int) -> PartitionOffset:
        """The mark of `partition`; a fresh one where nothing was delivered of it."""
        for number, mark in self.marks:
            if number == partition:
                return mark
        return PartitionOffset()

    def after(self, partition: int, mark: PartitionOffset, turn: int) -> PartitionCursor:
        """The cursor once `partition` has reached `mark`, when it will be the turn of partition `turn`."""
        marks = dict(self.marks)
        marks[partition] = mark
        return PartitionCursor(self.epoch, tuple(sorted(marks.items())), turn)

    def ended(self) -> frozenset[int]:
        """The partitions that have nothing left."""
        return frozenset(partition for partition, mark in self.marks if mark.ended)

    def next_epoch(self) -> PartitionCursor:
        """The start of the epoch after this one."""
        return PartitionCursor(self.epoch + 1)
