"""Epochs of live streams, and reports of progress to their sources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from feedline.core.cursor import PartitionCursor
from feedline.core.live import LiveDataset, is_live
from feedline.core.schedule import PartitionSchedule
from feedline.errors import ArgumentError
from feedline.loader.plan import Plan


@dataclass(slots=True)
class LiveRun:
    """One epoch of a live stream on this rank.

    Only partitions of this rank are reported: the marks of the others are as old as the loaded state.
    """

    dataset: LiveDataset
    own_partitions: tuple[int, ...]
    run: int
    """Its number among those of the dataset: a later one may be read before this one is closed."""

    @classmethod
    def of(cls, dataset: Any, plan: Plan) -> LiveRun | None:
        """The run of a live stream; None for other datasets."""
        schedule = plan.schedule
        if not isinstance(schedule, PartitionSchedule) or not is_live(dataset):
            return None
        return cls(dataset, schedule.own_partitions, dataset.runs)

    def begin(self, start: Any, former: Any) -> PartitionCursor:
        """The cursor of an epoch, with the source's place in each partition.

        `former` is the cursor at which the loop left the previous epoch; None if this process did not run that epoch.
        """
        cursor: PartitionCursor = start if former is None else former.at_epoch(start.epoch)
        begun = self.dataset.begin(cursor.epoch, {number: _state(cursor, number) for number in self.own_partitions})
        self.run = self.dataset.runs
        for number, state in begun.items():
            mark = replace(cursor.mark(number), state=(None, state))
            cursor = cursor.after(number, mark, cursor.next_partition, is_step=False)
        return cursor

    def is_over(self, cursor: PartitionCursor) -> bool:
        """True if the epoch ends with the delivered batches."""
        return self.dataset.is_over(cursor.epoch, [_state(cursor, number) for number in self.own_partitions])

    def acknowledge(self, cursor: PartitionCursor, *, now: bool = False) -> None:
        """Report to the source that the loop is past `cursor`.

        The source may collect reports; with `now`, it gets this one at once.
        """
        self.dataset.acknowledge({number: _state(cursor, number) for number in self.own_partitions}, now=now)

    def stop_waiting(self) -> None:
        """End draws of this run that wait for messages."""
        self.dataset.stop_waiting(self.run)

    def finish(self) -> None:
        """Report the remaining places, and close the connections.

        A later run reports the places of this one, too: both must not use one connection.
        """
        try:
            if self.run == self.dataset.runs:
                self.dataset.acknowledge({}, now=True)
        finally:
            self.dataset.disconnect(self.run)


def check_live(loader: Any) -> None:
    """Raise `ArgumentError` for arguments with which a live stream would lose messages."""
    if loader.drop_last and is_live(loader.dataset):
        raise ArgumentError(
            "drop_last=True would lose the messages of a batch that is not full when max_wait_s is over: leave it out, "
            "or raise max_wait_s"
        )


def _state(cursor: PartitionCursor, partition: int) -> Any:
    state = cursor.mark(partition).state
    return None if state is None else state[1]
