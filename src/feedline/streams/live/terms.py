"""Arguments of live streams, and the protocol of a connection."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol, get_args

from feedline.core.arguments import check_one_of
from feedline.errors import ArgumentError
from feedline.streams.live.decoding import MessageDecode

Place = Any
"""A place between two messages of a partition: a JSON value, whose meaning depends on the source."""


Start = Literal["earliest", "latest"]


class RetainedRange(NamedTuple):
    """Places of the oldest message of a source, and after its newest."""

    first: Place
    end: Place


class MessageRun(NamedTuple):
    """Messages of one partition, and the place after each.

    `end` is the place reached, if the source leaves out messages; None for that of the last message.
    """

    partition: int
    messages: list[Any]
    places: list[Place]
    end: Place = None


class LiveClient(Protocol):
    """A connection to a source. One thread uses it at a time.

    All methods raise `SourceUnavailableError` if the source does not answer, and `SourceAccessError` if it refuses.
    """

    def retained(self, partition: int) -> RetainedRange:
        """Places of the oldest message, and after the newest."""

    def is_lost(self, partition: int, place: Place, retained: RetainedRange) -> bool:
        """True if messages after `place` are no longer kept."""

    def committed(self, partition: int) -> Place | None:
        """The place that was committed for the group, or None."""

    def commit(self, places: Mapping[int, Place]) -> None:
        """Commit places for the group."""

    def seek(self, partition: int, place: Place) -> None:
        """Read the partition from `place` on."""

    def poll(self, partitions: Sequence[int], most: int, timeout_s: float) -> list[MessageRun]:
        """The next messages, about `most`; none if none arrive within `timeout_s`."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """Bounds of a live stream.

    `buffer` messages of a partition are held ahead of the loop. A message of more than `message_nbytes` counts as one
    that cannot be parsed. `connect_s` bounds one request to the source; `patience_s` the time for which a running
    stream tries to reach it again. `commit_every_s` is the least time between two commits.
    """

    buffer: int = 4096
    message_nbytes: int = 16 << 20
    connect_s: float = 10.0
    patience_s: float = 60.0
    commit_every_s: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value >= (0 if name.endswith("_s") else 1):
                raise ArgumentError(f"LiveLimits.{name} is {value!r}, which is too small")


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """The arguments that all live streams have."""

    group: str | None
    decode: MessageDecode
    start: Start
    max_wait_s: float
    stop_after: int | None
    until: Literal["latest"] | datetime | None
    lost: Literal["raise", "skip"]
    limits: LiveLimits

    def __post_init__(self) -> None:
        check_one_of("start", self.start, get_args(Start))
        check_one_of("lost", self.lost, ("raise", "skip"))
        if not self.max_wait_s > 0:
            raise ArgumentError(f"max_wait_s must be above 0, but is {self.max_wait_s!r}")
        if self.stop_after is not None and operator.index(self.stop_after) < 1:
            raise ArgumentError(f"stop_after must be at least 1, but is {self.stop_after}")
        if isinstance(self.until, datetime) and self.until.tzinfo is None:
            raise ArgumentError(f"until={self.until!r} has no time zone: pass datetime(..., tzinfo=timezone.utc)")
        if not isinstance(self.until, datetime) and self.until not in (None, "latest"):
            raise ArgumentError(f"until must be 'latest' or a datetime; got {self.until!r}")


def without_secrets(addresses: str) -> str:
    """The addresses without user names and passwords, for errors."""
    return re.sub(r"(?<=://)[^,\s]*@", "", addresses)


def look_up(address: str, name: str) -> str:
    """The address; for `env:NAME`, the value of that environment variable.

    Raises `ArgumentError` for an empty address, and for a variable that is not set.
    """
    if not address:
        raise ArgumentError(f"{name} must be a text, such as 'host:port'; got {address!r}")
    if not address.startswith("env:"):
        return address
    try:
        return os.environ[address[4:]]
    except KeyError:
        raise ArgumentError(f"the environment variable {address[4:]} is not set; it should hold {name}") from None
