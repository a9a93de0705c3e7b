"""Topics of Kafka and of compatible brokers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

from feedline.core import optional
from feedline.errors import (
    ArgumentError,
    MessageTooLargeError,
    OffsetLostError,
    SourceAccessError,
    SourceError,
    SourceUnavailableError,
)
from feedline.streams.live.base import LiveStream
from feedline.streams.live.decoding import MessageDecode
from feedline.streams.live.terms import LiveLimits, LiveOptions, MessageRun, RetainedRange, Start, look_up

_ACCESS = (
    *("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED"),
    *("CLUSTER_AUTHORIZATION_FAILED", "_SSL"),
)

_UNREACHABLE = (
    *("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "REQUEST_TIMED_OUT", "LEADER_NOT_AVAILABLE"),
    *("NOT_LEADER_FOR_PARTITION", "COORDINATOR_LOAD_IN_PROGRESS", "_WAIT_COORD", "BROKER_NOT_AVAILABLE"),
)

_LOST = ("OFFSET_OUT_OF_RANGE", "_AUTO_OFFSET_RESET")

_NO_OFFSET = -1001

_AT_ONCE = 1024
"""Most messages taken from librdkafka by one call."""


class Kafka(LiveStream):
    """Messages of one topic, with its partitions; see `LiveStream`.

    `servers` is "host:port,host:port", or `env:NAME`. `settings` are those of librdkafka, such as credentials. Places
    are offsets. Values are the messages; keys and headers are not read.
    """

    def __init__(
        self, topic: str, *, servers: str, group: str | None = None, decode: MessageDecode = "bytes",
        start: Start = "earliest", max_wait_s: float = 1.0, stop_after: int | None = None,
        until: Literal["latest"] | datetime | None = None, lost: Literal["raise", "skip"] = "raise",
        settings: Mapping[str, Any] | None = None, limits: LiveLimits | None = None,
    ) -> None:  # fmt: skip
        self.topic, self.servers, self.settings = topic, servers, dict(settings or {})
        limits = limits or LiveLimits()
        super().__init__(LiveOptions(group, decode, start, max_wait_s, stop_after, until, lost, limits))

    def open_client(self) -> KafkaClient:
        """Open a consumer without assigned partitions."""
        return KafkaClient(self)

    def address(self, partition: int, place: int) -> str:
        """Topic, partition and offset of a message."""
        return f"{self.topic}[{partition}]@{place - 1}"

    def fingerprint(self) -> str:
        """Text that names the topic."""
        return f"Kafka({self.topic!r})"

    @cached_property
    def num_partitions(self) -> int:
        """Number of partitions of the topic when it was first queried."""
        client = self.open_client()
        try:
            return client.count_partitions()
        finally:
            client.close()


class KafkaClient:
    """A consumer of one topic; see `LiveClient`."""

    def __init__(self, stream: Kafka) -> None:
        self._kafka = optional.load("confluent_kafka", "kafka", "streams.Kafka")
        self._stream, self._limit_s = stream, stream.terms.limits.connect_s
        self._assigned: set[int] = set()
        self._paused: set[int] = set()
        self._noted: list[Any] = []
        settings = {
            "bootstrap.servers": look_up(stream.servers, "servers"),
            "group.id": stream.terms.group or "feedline",  # librdkafka demands one; nothing is committed without ours
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,  # the end of a partition is not always a message
            "auto.offset.reset": "error",
            "queued.max.messages.kbytes": 16_384,  # the library reads ahead, by partition
            "fetch.wait.max.ms": 100,
            "log_level": 0,  # its log messages become errors here
            "error_cb": self._noted.append,
            **stream.settings,
        }
        try:
            self._consumer = self._kafka.Consumer(settings)
        except self._kafka.KafkaException as error:
            raise ArgumentError(f"librdkafka refuses the settings of {stream.fingerprint()}: {error}") from None

    def count_partitions(self) -> int:
        """Number of partitions; `SourceError` if the topic does not exist."""
        topics = self._ask(lambda: self._consumer.list_topics(self._stream.topic, timeout=self._limit_s)).topics
        found = topics[self._stream.topic]
        if found.error is not None:
            self._raise(found.error)
        if not found.partitions:
            raise self._missing_topic_error()
        return len(found.partitions)

    def retained(self, partition: int) -> RetainedRange:
        """Offsets of the oldest message, and of the next one."""
        at = self._place(partition)
        return RetainedRange(*self._ask(lambda: self._consumer.get_watermark_offsets(at, timeout=self._limit_s)))

    def is_lost(self, partition: int, place: int, retained: RetainedRange) -> bool:  # noqa: ARG002 - the protocol
        """True if the offset is out of range.

        An offset beyond the end means that the topic was created again.
        """
        return not retained.first <= place <= retained.end

    def committed(self, partition: int) -> int | None:
        """The group's offset, or None."""
        (found,) = self._ask(lambda: self._consumer.committed([self._place(partition)], timeout=self._limit_s))
        return None if found.offset == _NO_OFFSET else int(found.offset)

    def commit(self, places: Mapping[int, int]) -> None:
        """Commit the group's offsets, and wait for the brokers."""
        offsets = [self._place(partition, place) for partition, place in places.items()]
        for done in self._ask(lambda: self._consumer.commit(offsets=offsets, asynchronous=False)):
            if done.error is not None:
                self._raise(done.error)

    def seek(self, partition: int, place: int) -> None:
        """Assign a partition, from an offset on."""
        if partition in self._assigned:
            self._consumer.incremental_unassign([self._place(partition)])
        self._consumer.incremental_assign([self._place(partition, place)])
        self._assigned.add(partition)
        self._paused.discard(partition)

    def poll(self, partitions: Sequence[int], most: int, timeout_s: float) -> list[MessageRun]:
        """The next messages, as runs of one partition each."""
        self._pause_all_but(set(partitions))
        # What is there at once, in one call; otherwise the library waits for the whole number.
        messages = self._consumer.consume(_AT_ONCE, 0.0) or self._consumer.consume(max(1, most), timeout_s)
        self._check_noted(was_idle=not messages)
        # Messages of a partition come in runs, so grouping by neighbors is cheap.
        return [self._chunk(partition, list(run)) for partition, run in groupby(messages, _partition_of)]

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def _chunk(self, partition: int, run: list[Any]) -> MessageRun:
        values, places, end = [], [], None
        for message in run:
            error = message.error()
            if error is None:
                values.append(message.value() or b"")
                places.append(message.offset() + 1)
                end = None  # messages have arrived since
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                end = message.offset()
            elif error.name() in _LOST and self._stream.terms.lost == "skip":
                self._skip_lost(partition)
            else:
                self._raise(error, partition)
        return MessageRun(partition, values, places, end)

    def _skip_lost(self, partition: int) -> None:
        """Continue with the oldest message."""
        first = self.retained(partition).first
        warnings.warn(
            f"{self._stream.topic}[{partition}]: messages were deleted before they were delivered; continuing with the"
            f" oldest message, at {first}",
            stacklevel=2,
        )
        self.seek(partition, first)

    def _pause_all_but(self, wanted: set[int]) -> None:
        full = self._assigned - wanted
        if full != self._paused:
            if more := full - self._paused:
                self._consumer.pause([self._place(partition) for partition in more])
            if less := self._paused - full:
                self._consumer.resume([self._place(partition) for partition in less])
            self._paused = full

    def _place(self, partition: int, offset: int = _NO_OFFSET) -> Any:
        return self._kafka.TopicPartition(self._stream.topic, partition, offset)

    def _ask(self, question: Any) -> Any:
        try:
            return question()
        except self._kafka.KafkaException as error:
            # A question does not deliver the errors in the background, which have the cause. With partitions, poll()
            # delivers them; here it could take a message, too.
            if not self._assigned:
                self._consumer.poll(0)
            self._raise(error.args[0])

    def _check_noted(self, *, was_idle: bool) -> None:
        """Raise fatal errors that librdkafka has reported in the background."""
        noted, self._noted[:] = list(self._noted), []
        for error in noted:
            if error.name() in _ACCESS or (was_idle and error.name() == "_ALL_BROKERS_DOWN"):
                self._raise(error)

    def _raise(self, error: Any, partition: int | None = None) -> None:
        """Raise feedline's error for an error of librdkafka."""
        # A question that timed out has its cause among the errors in the background.
        causes = [each for each in self._noted if each.name() in _ACCESS] or [error]
        name, text = causes[0].name(), causes[0].str()
        who = f"the brokers {self._stream.servers}"
        topic = self._stream.topic if partition is None else f"{self._stream.topic}[{partition}]"
        if name in _ACCESS:
            raise SourceAccessError(
                f"{who} refuse the credentials for {topic}: {text}. Check sasl.username, sasl.password and"
                " security.protocol in settings=, and the rights of the group"
            )
        if name in _UNREACHABLE:
            raise SourceUnavailableError(
                f"{who} do not answer ({text}): check servers=, security.protocol in settings=, and that this"
                " machine reaches them"
            )
        if name in _LOST:
            raise OffsetLostError(
                f"{topic}: the offset is out of retention ({text}). Keep messages for longer; lost='skip' continues"
                " with the oldest message"
            )
        if name == "MSG_SIZE_TOO_LARGE":
            raise MessageTooLargeError(
                f"{topic}: {text}: raise receive.message.max.bytes and fetch.message.max.bytes in settings="
            )
        if name in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
            raise self._missing_topic_error()
        raise SourceError(f"{who}, {topic}: {text} ({name})")

    def _missing_topic_error(self) -> SourceError:
        """The error for a topic that the brokers do not know."""
        return SourceError(
            f"the topic {self._stream.topic!r} does not exist on {self._stream.servers}: make it, or check its name"
        )


def _partition_of(message: Any) -> int:
    return int(message.partition())
