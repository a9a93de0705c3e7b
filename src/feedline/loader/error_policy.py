"""Policy and log of failed samples."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, get_args

from feedline.core.arguments import check_one_of
from feedline.core.batch import SkippedSample
from feedline.errors import ArgumentError, ErrorLimitError

Action = Literal["raise", "skip", "replace"]


_ACTIONS = get_args(Action)


REMEMBERED = 8
"""Number of the latest skipped samples in a state, which bounds its size."""


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """Action on a sample that raises, error limit and quarantine file.

    "raise" raises the error in the loop. "skip" leaves the sample out, so its batch is smaller. "replace" takes the
    sample at the next index that works. More than `limit` failures in one epoch (None: no limit) raise
    `ErrorLimitError`. Each failure is appended to the file `quarantine` as one JSON line. A sample that kills its
    worker process is left out by "replace" too.
    """

    action: Action = "skip"
    limit: int | None = 100
    quarantine: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_one_of("on_error", self.action, _ACTIONS)
        if self.limit is not None and self.limit < 0:
            raise ArgumentError(f"ErrorPolicy.limit must not be negative; got {self.limit}")

    @classmethod
    def of(cls, on_error: Action | ErrorPolicy) -> ErrorPolicy:
        """The policy for the `on_error` argument of a DataLoader."""
        if on_error == "raise":  # each loader asks, and a new value takes a microsecond
            return _RAISE
        return on_error if isinstance(on_error, ErrorPolicy) else cls(action=on_error)


_RAISE = ErrorPolicy("raise")


@dataclass(slots=True)
class Quarantine:
    """Count and list of the failed samples of one loader."""

    policy: ErrorPolicy
    count: int = 0
    this_epoch: int = 0
    latest: tuple[tuple[int, int, Any], ...] = ()
    merged_counts: tuple[int, int] = (0, 0)
    """`count` and `this_epoch` of the merged state that all ranks were resumed from."""
    ended: int = 0
    """`this_epoch` at the end of the latest epoch."""
    _last: SkippedSample | None = None

    def add(self, skips: Iterable[SkippedSample]) -> None:
        """Record failures of a batch before its delivery; ErrorLimitError above the limit."""
        for skip in skips:
            self.count += 1
            self.this_epoch += 1
            self._last = skip
            self.latest = (*self.latest, (skip.epoch, skip.position, _plain(skip.index)))[-REMEMBERED:]
            self._write(skip)
            if self.policy.limit is not None and self.this_epoch > self.policy.limit:
                raise ErrorLimitError(
                    f"{self.this_epoch} samples of epoch {skip.epoch} failed, more than ErrorPolicy.limit="
                    f"{self.policy.limit} allows; the last one, index {skip.index!r}: {skip.error}. "
                    "Check the data, or raise the limit (None: no limit)."
                )

    def end_epoch(self) -> None:
        """Begin to count for the next epoch."""
        self.ended, self.this_epoch, self.merged_counts = self.this_epoch, 0, (self.merged_counts[0], 0)

    def check_not_empty(self) -> None:
        """Raise ErrorLimitError, whatever the limit, if samples of this epoch failed.

        Call it at the end of an epoch without a delivered sample.
        """
        skip = self._last
        if self.this_epoch and skip is not None:
            raise ErrorLimitError(
                f"all {self.this_epoch} samples of epoch {skip.epoch} failed, so the epoch is empty; the last one, "
                f"index {skip.index!r}: {skip.error}. Read one sample to see its error: dataset"
                f"[{skip.index!r}]"
            )

    def _write(self, skip: SkippedSample) -> None:
        if self.policy.quarantine is None:
            return
        line = {**skip._asdict(), "index": _plain(skip.index)}
        if skip.content is None:
            del line["content"]
        with open(self.policy.quarantine, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _plain(index: Any) -> Any:
    return index if isinstance(index, (int, str, float)) else repr(index)
