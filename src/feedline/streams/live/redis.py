"""Streams of Redis and Valkey."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar

from feedline.core import optional
from feedline.errors import ArgumentError, SampleError, SourceAccessError, SourceError, SourceUnavailableError
from feedline.streams.live.base import LiveStream
from feedline.streams.live.decoding import MessageDecode
from feedline.streams.live.terms import (
    LiveLimits,
    LiveOptions,
    MessageRun,
    RetainedRange,
    Start,
    look_up,
    without_secrets,
)

T = TypeVar("T")


class Redis(LiveStream):
    """Entries of Redis streams, each a partition; see `LiveStream`.

    `server` is `redis://host:port`, or `env:NAME`, which may hold a password. The message of an entry is its field
    `field`, or with None the mapping of all fields. Places are the identifiers of entries. `group` is a consumer group
    of each stream, whose last delivered entry is set.
    """

    def __init__(
        self, keys: str | Sequence[str], *, server: str, field: str | None = "data", group: str | None = None,
        decode: MessageDecode = "bytes", start: Start = "earliest", max_wait_s: float = 1.0,
        stop_after: int | None = None,
        until: Literal["latest"] | datetime | None = None, lost: Literal["raise", "skip"] = "raise",
        limits: LiveLimits | None = None,
    ) -> None:  # fmt: skip
        self.keys = [keys] if isinstance(keys, str) else list(keys)
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise ArgumentError(f"keys must be the names of streams, each once; got {keys!r}")
        self.server, self.field = server, field
        limits = limits or LiveLimits()
        super().__init__(LiveOptions(group, decode, start, max_wait_s, stop_after, until, lost, limits))

    def open_client(self) -> RedisClient:
        """Open a connection."""
        return RedisClient(self)

    def address(self, partition: int, place: Any) -> str:
        """Key and identifier of an entry."""
        return f"{self.keys[partition]}@{place[0]}"

    def fingerprint(self) -> str:
        """Text that names the streams."""
        return f"Redis({', '.join(map(repr, self.keys))})"

    @property
    def num_partitions(self) -> int:
        """Number of keys."""
        return len(self.keys)

    @staticmethod
    def order(place: Any) -> tuple[int, int]:
        """The two numbers of an identifier."""
        first, _, second = place[0].partition("-")
        return int(first), int(second or 0)


class RedisClient:
    """A connection to Redis; see `LiveClient`.

    A place is the identifier of the last entry and the number of entries of the stream before the next, deleted ones
    included: it shows if unread entries have been deleted.
    """

    def __init__(self, stream: Redis) -> None:
        self._redis = optional.load("redis", "redis", "streams.Redis")
        self._stream = stream
        limit_s = stream.terms.limits.connect_s
        self._places: dict[int, list[Any]] = {}
        try:
            self._client = self._redis.Redis.from_url(
                look_up(stream.server, "server"), socket_connect_timeout=limit_s, socket_timeout=limit_s + 1.0
            )
        except ValueError as error:
            raise ArgumentError(f"server is not an address of Redis, such as redis://localhost:6379: {error}") from None
        self._field = None if stream.field is None else stream.field.encode()

    def retained(self, partition: int) -> RetainedRange:
        """Places before the oldest entry, and after the newest."""
        info = self._about(partition)
        if info is None:
            return RetainedRange(["0-0", 0], ["0-0", 0])
        deleted = info["entries-added"] - info["length"]
        return RetainedRange(["0-0", deleted], [_text(info["last-generated-id"]), info["entries-added"]])

    def is_lost(self, partition: int, place: Any, retained: RetainedRange) -> bool:
        """True if unread entries were deleted."""
        info = self._about(partition)
        first = info and info.get("first-entry")
        if not first:  # empty: entries added since were deleted
            return bool(retained.end[1] > place[1])
        is_behind = self._stream.order([_text(first[0])]) > self._stream.order(place)
        return bool(is_behind and retained.first[1] > place[1])

    def committed(self, partition: int) -> Any:
        """Place of the group's last delivered entry, or None."""
        key = self._stream.keys[partition]
        if self._about(partition) is None:
            return None
        groups = self._ask(lambda: self._client.xinfo_groups(key))
        for each in groups:
            if _text(each["name"]) == self._stream.terms.group:
                read = each.get("entries-read")
                return None if read is None else [_text(each["last-delivered-id"]), read]
        return None

    def commit(self, places: Mapping[int, Any]) -> None:
        """Set the group's last delivered entry; creates the group if needed."""
        group = self._stream.terms.group
        for partition, (last, count) in places.items():
            key = self._stream.keys[partition]
            set_to = {"id": last, "entries_read": count}
            try:
                self._ask(lambda: self._client.xgroup_setid(key, group, **set_to))  # noqa: B023 - called here
            except SourceError as error:
                if "NOGROUP" not in str(error) and "requires the key" not in str(error):
                    raise
                self._ask(lambda: self._client.xgroup_create(key, group, mkstream=True, **set_to))  # noqa: B023

    def seek(self, partition: int, place: Any) -> None:
        """Read the entries after `place`."""
        self._places[partition] = list(place)

    def poll(self, partitions: Sequence[int], most: int, timeout_s: float) -> list[MessageRun]:
        """The next entries of these streams."""
        by_key = {self._stream.keys[number].encode(): number for number in partitions}
        behind = {key: self._places[number][0] for key, number in by_key.items()}
        block_ms = max(1, int(timeout_s * 1000)) if timeout_s else None  # for Redis, 0 is forever
        found = self._ask(lambda: self._client.xread(behind, count=most, block=block_ms)) if behind else []
        pairs = found.items() if isinstance(found, dict) else found  # a mapping in the newer protocol
        chunks = [self._chunk(by_key[key], entries) for key, entries in pairs]
        return chunks or [run for number in partitions if (run := self._passed_deleted(number)) is not None]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _chunk(self, partition: int, entries: Any) -> MessageRun:
        if entries and isinstance(entries[0], list):
            (entries,) = entries
        count = self._count_before(partition, [last.decode() for last, _ in entries])
        places = [[last.decode(), count + number] for number, (last, _) in enumerate(entries, 1)]
        self._places[partition] = places[-1]
        if self._field is None:
            return MessageRun(partition, [fields for _, fields in entries], places)
        name = self._field
        messages = [fields[name] if name in fields else _missing_field_error(name, fields) for _, fields in entries]
        return MessageRun(partition, messages, places)

    def _count_before(self, partition: int, read: list[str]) -> int:
        """Number of entries before those just read.

        Raises `OffsetLostError`, or warns, if some of them were deleted before they were read.
        """
        place, order = self._places[partition], self._stream.order
        info = self._about(partition)
        if info is None:  # the stream was deleted since
            return int(place[1])
        first = info.get("first-entry")
        oldest = order([_text(first[0])]) if first else None
        if oldest is not None and oldest <= order(place):
            return int(place[1])
        if order([_text(info.get("max-deleted-entry-id", "0-0"))]) >= order([read[0]]):
            return int(place[1])  # single ones were deleted, and Redis does not tell how many of them come later
        # Entries that were read may have been trimmed since, too.
        gone = sum(oldest is None or order([each]) < oldest for each in read)
        before = info["entries-added"] - info["length"] - gone
        if before > place[1]:
            end = [_text(info["last-generated-id"]), info["entries-added"]]
            self._stream.after_loss(partition, place, RetainedRange([read[0], before], end))
        return max(int(place[1]), int(before))

    def _passed_deleted(self, partition: int) -> MessageRun | None:
        """A run up to the newest identifier, if its entries were deleted."""
        place, info = self._places[partition], self._about(partition)
        newest = place if info is None else [_text(info["last-generated-id"]), info["entries-added"]]
        if self._stream.order(newest) <= self._stream.order(place):
            return None
        key = self._stream.keys[partition].encode()
        if self._ask(lambda: self._client.xread({key: place[0]}, count=1, block=None)):
            return None  # they have arrived since
        retained = self.retained(partition)
        if self.is_lost(partition, place, retained):
            self._stream.after_loss(partition, place, retained)
        self._places[partition] = newest
        return MessageRun(partition, [], [], newest)

    def _about(self, partition: int) -> dict[str, Any] | None:
        """Redis's facts about a stream; None if the stream does not exist."""
        key = self._stream.keys[partition]
        try:
            info: dict[str, Any] = self._ask(lambda: self._client.xinfo_stream(key))
        except SourceError as error:
            if "no such key" in str(error):
                return None
            raise
        return info

    def _ask(self, question: Callable[[], T]) -> T:
        errors, who = self._redis.exceptions, f"the server {without_secrets(self._stream.server)}"
        try:
            return question()
        except (errors.AuthenticationError, errors.NoPermissionError) as error:
            raise SourceAccessError(
                f"{who} refuses the credentials: {error}. Put redis://user:password@host:port into an environment"
                " variable and pass server='env:NAME'"
            ) from None
        except (errors.ConnectionError, errors.TimeoutError) as error:
            text = f"{who} does not answer ({error}): check server=, and that this machine reaches it"
            raise SourceUnavailableError(text) from None
        except errors.ResponseError as error:
            if str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
                raise SourceAccessError(f"{who} refuses the credentials: {error}") from None
            raise SourceError(f"{who}: {error}") from None


def _missing_field_error(field: bytes, fields: Mapping[bytes, bytes]) -> SampleError:
    """The error in place of an entry without the field."""
    return SampleError(
        f"the entry has no field {_text(field)!r}, but {', '.join(map(_text, fields))}: pass field=, or field=None for"
        " all fields"
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
