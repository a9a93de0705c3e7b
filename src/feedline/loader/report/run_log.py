"""History of a run: points in memory, and a log on disk.

Both are bounded in size. The log has a line of JSON per interval and epoch.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from feedline.core.paths import replacing

_log = logging.getLogger("feedline")


INTERVAL_S = 10.0
"""Time between two lines."""


FIRST_INTERVAL_S = 1.0
"""Time between the first two lines: it doubles until it is the usual one."""


MAX_NBYTES = 8 << 20
"""Size above which lines close in time are removed, and the interval is doubled: the whole run stays in the log."""


class RunLog:
    """Log of one loader. Loaders of one process may share a file.

    A failure to write, such as a full disk, is logged once and ends the log, but not the run.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        first_s: float = FIRST_INTERVAL_S,
        interval_s: float = INTERVAL_S,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        self.path = Path(path)
        self._next_s = first_s
        self._interval_s, self._max_nbytes = interval_s, max_nbytes
        self._due_s = 0.0
        self._began = self._failed = False

    def write(self, figures: Mapping[str, Any], event: str = "interval") -> None:
        """Append a line; one of an "interval" must be due.

        `figures` have a "time_s".
        """
        now_s = time.monotonic()
        if self._failed or (event == "interval" and now_s < self._due_s):
            return
        # The first intervals are short and double: a run that is left or killed early has its latest lines, too.
        self._due_s = now_s + min(self._next_s, self._interval_s)
        self._next_s *= 2
        line = _line({**figures, "event": event})
        try:
            with self.path.open("ab+") as file:
                if not self._began and _is_cut_off(file):  # by the kill of an earlier run
                    file.write(b"\n")
                self._began = True
                file.write(line.encode())
                nbytes = file.tell()
            if nbytes > self._max_nbytes:
                self._thin_out()
        except OSError as error:
            self._failed = True
            _log.warning("the run log %s ends here: %s", self.path, error)

    def _thin_out(self) -> None:
        """Halve the file: of lines close in time, one stays."""
        lines = read_log(self.path)
        timed, foreign = list[dict[str, Any]](), list[dict[str, Any]]()
        for line in lines:
            (timed if isinstance(line.get("time_s"), int | float) else foreign).append(line)
        kept = timed
        step_s = 2 * _duration_s(timed) / max(len(timed), 1)
        # A loader with few lines keeps them, so the distance may have to grow until half of all lines are gone.
        while len(kept) > len(timed) // 2 and 0 < step_s < 4 * _duration_s(timed):
            kept = list(_last_of_each_step(timed, step_s))
            step_s *= 2
        if len(kept) > len(timed) // 2:  # of many loaders, each with its last line
            kept = kept[-(len(timed) // 2) :]
        text = "".join(_line(line) for line in [*foreign, *kept])
        with replacing(self.path) as file:
            file.write(text.encode())
        self._interval_s *= 2


def _is_cut_off(file: BinaryIO) -> bool:
    """True if the last line has no end."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _duration_s(lines: list[dict[str, Any]]) -> float:
    return max((line["time_s"] for line in lines), default=0.0) - min((line["time_s"] for line in lines), default=0.0)


def _last_of_each_step(lines: list[dict[str, Any]], step_s: float) -> Iterable[dict[str, Any]]:
    """The last line of each step and loader object, which sums most."""
    first_s = min(line["time_s"] for line in lines)
    kept = {
        (line.get("rank"), line.get("loader"), line.get("instance"), int((line["time_s"] - first_s) / step_s)): line
        for line in sorted(lines, key=lambda line: line["time_s"])
    }
    return sorted(kept.values(), key=lambda line: line["time_s"])


def _line(figures: Mapping[str, Any]) -> str:
    return json.dumps(figures, separators=(",", ":")) + "\n"


def path_of_rank(path: str | os.PathLike[str], rank: int, world_size: int) -> Path:
    """The path for one rank.

    `{rank}` is replaced, or else ".rank3" is put before the suffix. A single rank writes to the path itself.
    """
    text = os.fspath(path)
    if "{rank}" in text:
        return Path(text.replace("{rank}", str(rank)))
    plain = Path(text)
    return plain if world_size == 1 else plain.with_name(f"{plain.stem}.rank{rank}{plain.suffix}")


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run log, oldest first.

    Damaged lines are left out, such as an incomplete last line.
    """
    return [line for line in lines_of(path) if line is not None]


def lines_of(path: str | os.PathLike[str]) -> Iterator[dict[str, Any] | None]:
    """The lines of a run log; None for a damaged one."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                figures = json.loads(line)
            except (ValueError, RecursionError):  # the process was killed while it wrote, or another one is writing
                figures = None
            yield figures if isinstance(figures, dict) else None


MOST_POINTS = 240
"""Points that are kept: more than a chart has columns."""


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
