"""Lines of TCP servers that take acknowledgements."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

from feedline.errors import ArgumentError, MessageTooLargeError, SourceAccessError, SourceError, SourceUnavailableError
from feedline.streams.live.base import LiveStream
from feedline.streams.live.decoding import MessageDecode
from feedline.streams.live.terms import LiveLimits, LiveOptions, MessageRun, RetainedRange, Start, look_up

_DONE = "OK"


_RECEIVED = 1 << 18
"""Most bytes received by one call."""


class SocketLines(LiveStream):
    """Lines of TCP servers, each server a partition; see `LiveStream`.

    `servers` are texts "host:port", or `env:NAME`. Places are numbers of lines, counted from 0. After it has connected,
    the stream sends one line, and the server answers:

    - `READ n`: `OK`, then the lines from number n on, each with its line feed, as they become available.
    - `KEPT`: one line with the number of the oldest line that it still has, and that of the next.
    - `ACK n group`: `OK`, after it has noted that `group` is done with all lines before n; it may drop them.
    - `ACKED group`: the number of the last `ACK` of the group, or `-`.

    Instead, `ERROR text` refuses the request, and `ERROR access text` the credentials. Only the first line of a
    connection is such an answer: later lines may begin with any word. A `token` is sent first, as `TOKEN text`, without
    an answer.
    """

    def __init__(
        self, servers: str | Sequence[str], *, token: str | None = None, group: str | None = None,
        decode: MessageDecode = "text", start: Start = "earliest", max_wait_s: float = 1.0,
        stop_after: int | None = None,
        until: Literal["latest"] | datetime | None = None, lost: Literal["raise", "skip"] = "raise",
        limits: LiveLimits | None = None,
    ) -> None:  # fmt: skip
        self.servers = [servers] if isinstance(servers, str) else list(servers)
        if not self.servers:
            raise ArgumentError("servers is empty: pass at least one 'host:port'")
        if group is not None and group.split() != [group]:
            raise ArgumentError(f"group must be one word, because it is part of a line; got {group!r}")
        self.token = token
        limits = limits or LiveLimits()
        super().__init__(LiveOptions(group, decode, start, max_wait_s, stop_after, until, lost, limits))

    def open_client(self) -> LinesClient:
        """A client whose connections open when they are needed."""
        return LinesClient(self)

    def address(self, partition: int, place: int) -> str:
        """Server and number of a line."""
        return f"{self.servers[partition]}@{place - 1}"

    def fingerprint(self) -> str:
        """Text with the number of servers, whose addresses may change."""
        return f"SocketLines({len(self.servers)})"

    @property
    def num_partitions(self) -> int:
        """Number of servers."""
        return len(self.servers)


class LinesClient:
    """Connections to the servers; see `LiveClient`."""

    def __init__(self, stream: SocketLines) -> None:
        self._stream, self._limits = stream, stream.terms.limits
        self._reading: dict[int, socket.socket] = {}
        self._places: dict[int, int] = {}
        self._rests: dict[int, bytes] = {}
        self._unanswered = set[int]()
        self._cut = set[int]()
        """Partitions in the middle of a line that is too long."""

    def retained(self, partition: int) -> RetainedRange:
        """The server's answer to KEPT."""
        answer = self._ask(partition, "KEPT")
        words = answer.split()
        if len(words) != 2 or not all(word.isdecimal() for word in words):
            self._refuse(partition, "KEPT", answer, "two numbers")
        return RetainedRange(int(words[0]), int(words[1]))

    def is_lost(self, partition: int, place: int, retained: RetainedRange) -> bool:  # noqa: ARG002 - the protocol
        """True if the server does not have the lines from `place` on."""
        return not retained.first <= place <= retained.end

    def committed(self, partition: int) -> int | None:
        """The server's answer to ACKED."""
        question = f"ACKED {self._stream.terms.group}"
        answer = self._ask(partition, question)
        if answer != "-" and not answer.isdecimal():
            self._refuse(partition, question, answer, "a number or -")
        return None if answer == "-" else int(answer)

    def commit(self, places: Mapping[int, int]) -> None:
        """Send ACK, and wait for the answer."""
        for partition, place in places.items():
            question = f"ACK {place} {self._stream.terms.group}"
            if (answer := self._ask(partition, question)) != _DONE:
                self._refuse(partition, question, answer, _DONE)

    def seek(self, partition: int, place: int) -> None:
        """Connect again, and send READ for the lines from `place` on."""
        self._drop(partition)
        connection = self._connect(partition)
        self._reading[partition], self._places[partition], self._rests[partition] = connection, place, b""
        self._unanswered.add(partition)
        self._cut.discard(partition)
        self._guarded(partition, connection.sendall, f"READ {place}\n".encode())

    def poll(self, partitions: Sequence[int], most: int, timeout_s: float) -> list[MessageRun]:  # noqa: ARG002 - the protocol
        """Lines of the servers that have sent some."""
        # Unlike select(), poll() takes descriptors of any number.
        with selectors.PollSelector() as selector:
            for partition in partitions:
                selector.register(self._reading[partition], selectors.EVENT_READ, partition)
            ready = [key.data for key, _ in selector.select(timeout_s)]
        return [self._receive(partition) for partition in ready]

    def close(self) -> None:
        """Close all connections."""
        for partition in list(self._reading):
            self._drop(partition)

    def _receive(self, partition: int) -> MessageRun:
        received = self._guarded(partition, self._reading[partition].recv, _RECEIVED)
        if not received:
            raise SourceUnavailableError(f"{self._who(partition)} has closed the connection")
        if partition in self._cut:
            _, end, received = received.partition(b"\n")
            if not end:
                return MessageRun(partition, [], [])
            self._cut.remove(partition)
        *lines, rest = (self._rests[partition] + received).split(b"\n")
        if lines and partition in self._unanswered:
            if (answer := _text(lines.pop(0))) != _DONE:
                self._refuse(partition, f"READ {self._places[partition]}", answer, _DONE)
            self._unanswered.remove(partition)
        first = self._places[partition]
        messages: list[Any] = lines
        if len(rest) > self._limits.message_nbytes:
            messages, rest = [*lines, self._too_long(partition, first + len(lines))], b""
            self._cut.add(partition)
        self._rests[partition], self._places[partition] = rest, first + len(messages)
        return MessageRun(partition, messages, list(range(first + 1, first + len(messages) + 1)))

    def _too_long(self, partition: int, number: int) -> MessageTooLargeError:
        """The error in place of a line; raised if it answers READ."""
        limit = f"LiveLimits.message_nbytes={self._limits.message_nbytes:,} bytes"
        remedy = "raise the limit, or check that the server ends its lines"
        if partition in self._unanswered:
            raise MessageTooLargeError(f"{self._who(partition)}: the answer to READ has more than {limit}: {remedy}")
        return MessageTooLargeError(
            f"{self._who(partition)}: line {number} has more than {limit}: {remedy}, or leave out such lines by"
            " on_error='skip'"
        )

    def _ask(self, partition: int, question: str) -> str:
        """Send a request on a new connection, and return the answer."""
        with self._connect(partition) as connection:
            self._guarded(partition, connection.sendall, f"{question}\n".encode())
            with connection.makefile("rb") as answers:
                line = self._guarded(partition, answers.readline)
        if not line:
            raise SourceUnavailableError(f"{self._who(partition)} has closed the connection instead of answering")
        return _text(line)

    def _refuse(self, partition: int, question: str, answer: str, expected: str) -> NoReturn:
        """Raise a `SourceError` for an answer other than the expected one."""
        who, text = self._who(partition), answer.removeprefix("ERROR ")
        if answer.startswith("ERROR access"):
            raise SourceAccessError(f"{who} refuses the credentials: {text}; check token=")
        if answer.startswith("ERROR "):
            raise SourceError(f"{who} refuses {question!r}: {text}")
        raise SourceError(
            f"{who} answers {question!r} with {answer[:80]!r} instead of {expected}: check servers=, and that it has"
            " the protocol of SocketLines"
        )

    def _connect(self, partition: int) -> socket.socket:
        server = look_up(self._stream.servers[partition], "a server")
        host, _, port = server.rpartition(":")
        if not host or not port.isdecimal():
            raise ArgumentError(f"{server!r} is not the address of a server: pass 'host:port'")
        try:
            connection = socket.create_connection((host, int(port)), self._limits.connect_s)
        except OSError as error:
            raise SourceUnavailableError(
                f"{self._who(partition)} does not answer ({error}): check servers=, and that this machine reaches it"
            ) from None
        if self._stream.token is not None:
            self._guarded(partition, connection.sendall, f"TOKEN {look_up(self._stream.token, 'a token')}\n".encode())
        return connection

    def _guarded(self, partition: int, act: Any, *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except OSError as error:
            raise SourceUnavailableError(f"{self._who(partition)} does not answer ({error})") from None

    def _drop(self, partition: int) -> None:
        connection = self._reading.pop(partition, None)
        if connection is not None:
            connection.close()

    def _who(self, partition: int) -> str:
        return f"the server {self._stream.servers[partition]}"


def _text(answer: bytes) -> str:
    return answer.decode(errors="replace").strip()
