"""History of a run at a resolution that its length allows."""

from __future__ import annotations

from typing import NamedTuple

MOST_POINTS = 240
"""Points that are kept: more than a chart has columns."""


FIRST_INTERVAL_S = 1.0


class HistoryPoint(NamedTuple):
    """Sums of a loader at one moment."""

    time_s: float
    """Seconds since 1970."""
    epoch: int
    batches: int
    samples: int
    wait_s: float
    step_s: float
    ready: int
    worker_nbytes: int


class History:
    """Points at equal distances, which double when there are too many.

    Not thread-safe.
    """

    def __init__(self, interval_s: float = FIRST_INTERVAL_S) -> None:
        self.points: list[HistoryPoint] = []
        self._interval_s = interval_s

    def is_due(self, time_s: float) -> bool:
        """True if this time is far enough from the last point."""
        return not self.points or time_s - self.points[-1].time_s >= self._interval_s

    def add(self, point: HistoryPoint) -> None:
        """Append a point."""
        points = [*self.points, point]
        if len(points) > MOST_POINTS:
            points = [*points[:-1:2], point]
            self._interval_s *= 2
        self.points = points  # readers in other threads keep the former list
