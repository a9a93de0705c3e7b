"""Streams of NATS JetStream."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from feedline.core import optional
from feedline.errors import ArgumentError, SourceAccessError, SourceError, SourceUnavailableError
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

_IDLE_S = 300.0
"""Time without a request after which the server deletes a consumer."""


_EXPIRES_S = 30.0
"""Time for which the server answers a request."""


_AT_ONCE = 512
"""Usual number of messages of one request."""


_HEARTBEAT, _CONFLICT = "100", "409"


_BUCKET = "feedline"
"""Key-value bucket of the committed places."""


class NATS(LiveStream):
    """Messages of a JetStream stream; see `LiveStream`.

    Each of `subjects`, which may have wildcards but must not overlap, is a partition; by default all of the stream is
    one. `servers` is "nats://host:port", or `env:NAME`; `settings` are those of `nats.connect`, such as credentials.
    Places are sequence numbers. `group` names a key in the key-value bucket "feedline"; consumers are temporary ones.
    """

    def __init__(
        self, stream: str, *, servers: str, subjects: Sequence[str] = (">",), group: str | None = None,
        decode: MessageDecode = "bytes", start: Start = "earliest", max_wait_s: float = 1.0,
        stop_after: int | None = None,
        until: Literal["latest"] | datetime | None = None, lost: Literal["raise", "skip"] = "raise",
        settings: Mapping[str, Any] | None = None, limits: LiveLimits | None = None,
    ) -> None:  # fmt: skip
        if isinstance(subjects, str) or not subjects or len(set(subjects)) < len(subjects):
            raise ArgumentError(f"subjects must be a list of subjects, each once; got {subjects!r}")
        self.stream, self.servers, self.subjects = stream, servers, list(subjects)
        self.settings = dict(settings or {})
        limits = limits or LiveLimits()
        super().__init__(LiveOptions(group, decode, start, max_wait_s, stop_after, until, lost, limits))

    def open_client(self) -> NATSClient:
        """Open a connection, with a thread for its event loop."""
        return NATSClient(self)

    def address(self, partition: int, place: int) -> str:
        """Stream, subject and sequence number of a message."""
        return f"{self.stream}[{self.subjects[partition]}]@{place - 1}"

    def fingerprint(self) -> str:
        """Text that names the stream and its subjects."""
        return f"NATS({self.stream!r}, {', '.join(map(repr, self.subjects))})"

    @property
    def num_partitions(self) -> int:
        """Number of subjects."""
        return len(self.subjects)


@dataclass(slots=True)
class _Feed:
    """A temporary consumer, and the messages that it has sent."""

    consumer: str
    inbox: str
    arrived: asyncio.Event
    subscription: Any = None
    messages: list[Any] = field(default_factory=list)
    due: int = 0
    """Messages that the server may still send."""
    received: int = 0
    problem: str = ""

    async def receive(self, message: Any) -> None:
        """Keep a message, or apply a status message of the server."""
        if message.reply:
            self.messages.append(message)
            self.due -= 1
            self.arrived.set()
            return
        headers = message.headers or {}
        status = headers.get("Status", "")
        if status == _CONFLICT and "exceed" not in headers.get("Description", "").lower():
            self.problem = headers.get("Description", "the consumer was deleted")
            self.arrived.set()
        elif status != _HEARTBEAT:
            self.due -= int(headers.get("Nats-Pending-Messages", self.due))


class NATSClient:
    """A connection to NATS; see `LiveClient`."""

    def __init__(self, stream: NATS) -> None:
        self._nats = optional.load("nats", "nats", "streams.NATS")
        self._api = optional.load("nats.js.api", "nats", "streams.NATS")
        self._stream, self._limit_s = stream, stream.terms.limits.connect_s
        self._feeds: dict[int, _Feed] = {}
        self._arrived = asyncio.Event()
        self._noted: list[Exception] = []
        self._loop = asyncio.new_event_loop()
        # A thread of its own: the loop's thread may run an event loop already, and the server wants answers meanwhile.
        self._thread = threading.Thread(target=self._loop.run_forever, name="feedline-nats", daemon=True)
        self._thread.start()
        self._connection: Any = None
        try:
            self._connection = self._run(self._connect())
            self._jetstream = self._connection.jetstream(timeout=self._limit_s)
        except BaseException:
            self.close()
            raise

    def retained(self, partition: int) -> RetainedRange:
        """The stream's first number, and that after the subject's last message."""
        return self._run(self._retained(self._stream.subjects[partition]))  # type: ignore[no-any-return]

    def is_lost(self, partition: int, place: int, retained: RetainedRange) -> bool:  # noqa: ARG002 - the protocol
        """True if messages of the stream from `place` on were deleted.

        They may be messages of other subjects.
        """
        state = self._run(self._jetstream.stream_info(self._stream.stream)).state
        return not state.first_seq <= place <= state.last_seq + 1

    def committed(self, partition: int) -> int | None:
        """The sequence number in the bucket, or None."""
        place: int | None = self._run(self._committed(self._key(partition)))
        return place

    def commit(self, places: Mapping[int, int]) -> None:
        """Write sequence numbers into the bucket; creates it if needed."""
        self._run(self._commit({self._key(partition): place for partition, place in places.items()}))

    def seek(self, partition: int, place: int) -> None:
        """Create a temporary consumer that begins at `place`."""
        self._run(self._unsubscribe(partition))
        self._run(self._subscribe(partition, place))

    def poll(self, partitions: Sequence[int], most: int, timeout_s: float) -> list[MessageRun]:
        """Messages of these subjects that have arrived."""
        if not partitions:
            return []
        chunks: list[MessageRun] = self._run(self._poll(partitions, most, timeout_s), timeout_s)
        return chunks

    def close(self) -> None:
        """Delete the consumers and close the connection."""
        if self._connection is not None and not self._connection.is_closed:
            with suppress(SourceError):  # the server forgets them by itself
                for partition in list(self._feeds):
                    self._run(self._unsubscribe(partition))
            with suppress(SourceError):
                self._run(self._connection.close())
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Cancel the remaining tasks of the loop."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connect(self) -> Any:
        async def note(error: Exception) -> None:
            self._noted.append(error)

        servers = [each.strip() for each in look_up(self._stream.servers, "servers").split(",")]
        known = {"allow_reconnect": False, "connect_timeout": self._limit_s, "error_cb": note}
        connection = self._nats.NATS()
        try:
            await connection.connect(servers, **{**known, **self._stream.settings})
        except BaseException:
            with suppress(Exception):  # a connection that was refused has a socket, too
                await connection.close()
            raise
        return connection

    async def _retained(self, subject: str) -> RetainedRange:
        state = (await self._jetstream.stream_info(self._stream.stream)).state
        try:
            last = await self._jetstream.get_last_msg(self._stream.stream, subject)
        except self._nats.js.errors.NotFoundError:  # none is kept, so there is nothing to wait for
            return RetainedRange(state.first_seq, state.first_seq)
        return RetainedRange(state.first_seq, last.seq + 1)

    async def _committed(self, key: str) -> int | None:
        try:
            bucket = await self._jetstream.key_value(_BUCKET)
            return int((await bucket.get(key)).value)
        except self._nats.js.errors.NotFoundError:
            return None

    async def _commit(self, places: Mapping[str, int]) -> None:
        try:
            bucket = await self._jetstream.key_value(_BUCKET)
        except self._nats.js.errors.NotFoundError:
            bucket = await self._jetstream.create_key_value(bucket=_BUCKET)
        for key, place in places.items():
            await bucket.put(key, str(place).encode())

    async def _subscribe(self, partition: int, place: int) -> None:
        config = self._api.ConsumerConfig(
            deliver_policy=self._api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(1, place),
            ack_policy=self._api.AckPolicy.NONE,
            inactive_threshold=_IDLE_S,
            filter_subject=self._stream.subjects[partition],
        )
        made = await self._jetstream.add_consumer(self._stream.stream, config)
        feed = _Feed(made.name, self._connection.new_inbox(), self._arrived)
        feed.subscription = await self._connection.subscribe(feed.inbox, cb=feed.receive)
        self._feeds[partition] = feed

    async def _unsubscribe(self, partition: int) -> None:
        feed = self._feeds.pop(partition, None)
        if feed is not None:
            await feed.subscription.unsubscribe()
            await self._jetstream.delete_consumer(self._stream.stream, feed.consumer)

    async def _poll(self, partitions: Sequence[int], most: int, timeout_s: float) -> list[MessageRun]:
        self._arrived.clear()
        for partition in partitions:
            await self._ask_for_more(self._feeds[partition], most)
        if timeout_s and not any(self._feeds[partition].messages for partition in partitions):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), timeout_s)
        if self._connection.is_closed:
            raise SourceUnavailableError(f"{self._who()} the connection is closed")
        return [self._chunk(partition) for partition in partitions if self._feeds[partition].messages]

    async def _ask_for_more(self, feed: _Feed, most: int) -> None:
        if feed.problem:
            raise SourceUnavailableError(f"{self._who()} {feed.problem}")
        wanted = max(most, min(_AT_ONCE, self._stream.terms.limits.buffer))
        # The request before is used up, or nearly: the server sends on while these messages are read.
        if feed.due <= wanted // 2 and len(feed.messages) <= wanted:
            feed.due += wanted
            request = {"batch": wanted, "expires": int(_EXPIRES_S * 1e9)}
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream.stream}.{feed.consumer}"
            await self._connection.publish(subject, json.dumps(request).encode(), feed.inbox)

    def _chunk(self, partition: int) -> MessageRun:
        feed = self._feeds[partition]
        messages, feed.messages = feed.messages, []
        places = []
        for message in messages:
            # $JS.ACK.[domain.account.]stream.consumer.delivered.sequence.consumer sequence.time.pending[.token]
            parts = message.reply.split(".")
            at = 5 if len(parts) < 11 else 7
            places.append(int(parts[at]) + 1)
            feed.received += 1
            if int(parts[at + 1]) != feed.received:
                raise SourceUnavailableError(f"{self._who()} lost a message on its way: it is read again")
        return MessageRun(partition, [message.data for message in messages], places)

    def _key(self, partition: int) -> str:
        """Key in the bucket, with characters escaped that keys cannot have."""
        text = f"{self._stream.terms.group}/{self._stream.stream}/{self._stream.subjects[partition]}"
        return re.sub(r"[^a-zA-Z0-9_/-]", lambda found: f"={ord(found[0]):x}=", text)

    def _who(self) -> str:
        return f"the servers {without_secrets(self._stream.servers)}, stream {self._stream.stream!r}:"

    def _run(self, question: Coroutine[Any, Any, Any], more_s: float = 0.0) -> Any:
        """Run a coroutine in the event loop, and translate its errors."""
        answer = asyncio.run_coroutine_threadsafe(question, self._loop)
        errors = self._nats.errors
        try:
            return answer.result(self._limit_s + more_s + 1.0)
        except SourceError:
            raise
        except self._nats.js.errors.NotFoundError as error:
            raise SourceError(f"{self._who()} not found ({error}): make the stream, or check its name") from None
        except (OSError, TimeoutError, errors.Error, self._nats.js.errors.Error) as error:
            answer.cancel()
            texts = " ".join(map(str, [error, *self._noted])).lower()
            if any(word in texts for word in ("authorization", "authentication", "permissions")):
                raise SourceAccessError(
                    f"{self._who()} the credentials are refused: {texts}. Pass user, password, token or"
                    " user_credentials in settings="
                ) from None
            raise SourceUnavailableError(
                f"{self._who()} no answer ({type(error).__name__}: {error}): check servers=, and that this machine"
                " reaches them"
            ) from None
