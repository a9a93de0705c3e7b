"""What happens to samples that fail: the policy, the count, and the file that lists them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, get_args

from feedline.core.batch import SkippedSample
from feedline.errors import ArgumentError, ErrorLimitError

Action = Literal["raise", "skip", "replace"]


REMEMBERED = 8
"""How many of the latest skips a state carries, so that it stays small."""


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What to do with a sample that raises.

    "raise" ends the loop with the error; "skip" leaves the sample out, so that its batch is smaller; "replace" takes
    the sample at the next index that works. More than `limit` failures in one epoch (None: any number) raise
    `ErrorLimitError`. `quarantine` is a file to which each failure is appended as one JSON line. A sample that kills
    its worker process is left out by "replace" too.
    """

    action: Action = "skip"
    limit: int | None = 100
    quarantine: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ArgumentError(f"on_error must be one of {', '.join(get_args(Action))}; got {self.action!r}")
        if self.limit is not None and self.limit < 0:
            raise ArgumentError(f"the limit of an ErrorPolicy must not be negative; got {self.limit}")

    @classmethod
    def of(cls, on_error: Action | ErrorPolicy) -> ErrorPolicy:
        """The policy that DataLoader's `on_error` argument means."""
        return on_error if isinstance(on_error, ErrorPolicy) else cls(action=on_error)


@dataclass(slots=True)
class Quarantine:
    """Counts and lists the samples of one loader that failed."""

    policy: ErrorPolicy
    count: int = 0
    this_epoch: int = 0
    latest: tuple[tuple[int, int, Any], ...] = ()
    _last: SkippedSample | None = None

    def add(self, skips: Iterable[SkippedSample]) -> None:
        """Record failures of a batch that is about to be delivered; raises once there are too many."""
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
                    "Look at the data, or raise the limit (None: no limit)."
                )

    def refuse_empty_epoch(self) -> None:
        """Raise if samples failed in an epoch of which nothing was delivered, whatever the limit."""
        skip = self._last
        if self.this_epoch and skip is not None:
            raise ErrorLimitError(
                f"all {self.this_epoch} samples of epoch {skip.epoch} failed, so nothing is left of it; the last one, "
                f"index {skip.index!r}: {skip.error}. Read one sample by itself to see its error: dataset"
                f"[{skip.index!r}]"
            )

    def _write(self, skip: SkippedSample) -> None:
        if self.policy.quarantine is None:
            return
        with open(self.policy.quarantine, "a", encoding="utf-8") as file:
            file.write(json.dumps({**skip._asdict(), "index": _plain(skip.index)}) + "\n")


def _plain(index: Any) -> Any:
    return index if isinstance(index, (int, str, float)) else repr(index)
