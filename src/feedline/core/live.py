"""Protocols of live datasets for the loader.

Their partitions have no end, and their epochs continue each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

from feedline.core.dataset import declared


class FailedMessage(NamedTuple):
    """A message that could not be decoded; its content is in base64."""

    address: str
    error: str
    content: str


class LiveDraw(NamedTuple):
    """The next samples of a live partition.

    Fewer samples than requested, or none, if the time is up.
    """

    samples: list[Any]
    failed: Sequence[FailedMessage] = ()


class LiveSamples(Protocol):
    """The samples of one live partition.

    Its state is the place after the last drawn sample.
    """

    def draw(self, size: int, *, skips: bool = False, seed: int | None = None) -> LiveDraw:
        """Up to `size` samples; StopIteration at the end of the epoch.

        Waits for a limited time, and for less if another partition has a batch ready. With `skips`, messages that
        cannot be decoded are left out; otherwise they raise, again at each call. With `seed`, the place of a message
        determines the draws of `sample_rng()`.
        """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LiveDataset(Protocol):
    """A partitioned dataset without an end.

    Each epoch begins where the loop left the previous one.
    """

    continues: bool
    """Always True."""
    runs: int
    """Number of `begin` calls in this process: the latest run."""

    def begin(self, epoch: int, states: Mapping[int, Any]) -> dict[int, Any]:
        """States of partitions at the start of an epoch.

        `states` has earlier ones, or None.
        """

    def is_over(self, epoch: int, states: Sequence[Any]) -> bool:
        """True if the epoch ends where these partitions are now."""

    def place_key(self, state: Any) -> Any:
        """JSON value that orders the places of a partition."""

    def acknowledge(self, states: Mapping[int, Any], *, now: bool) -> None:
        """Report to the source that the loop is past these states.

        With `now`, at once.
        """

    def stop_waiting(self, run: int) -> None:
        """End draws of a run in this process that wait for messages."""

    def disconnect(self, run: int) -> None:
        """Close connections of a run in this process."""


def is_live(dataset: Any) -> TypeGuard[LiveDataset]:
    """True for a dataset whose epochs continue each other."""
    return declared(dataset, "continues") is True and callable(declared(dataset, "begin"))
