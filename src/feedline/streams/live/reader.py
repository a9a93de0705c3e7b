"""Reader of all live partitions of one process, over one connection."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

from feedline.core.stage_parts import read_part
from feedline.errors import FeedlineError, SourceUnavailableError
from feedline.streams.live.terms import LiveClient, LiveOptions, Place

_LONGEST_POLL_S = 0.2
"""Longest wait for the source, after which a draw notices `stop()`."""


_RETRY_S = 0.25
"""Pause before another try to reach a source."""


@dataclass(slots=True)
class _Buffer:
    """Messages of one partition that were not drawn, and their places."""

    end: Any
    """Place up to which the source was read."""
    stop: Any
    messages: deque[Any] = field(default_factory=deque)
    places: deque[Any] = field(default_factory=deque)
    since_s: float = inf
    """Arrival time of the oldest message."""
    is_new: bool = True

    def take(self, size: int) -> tuple[list[Any], list[Any]]:
        count = min(size, len(self.messages))
        if count == len(self.messages):
            whole = list(self.messages), list(self.places)
            self.messages.clear()
            self.places.clear()
            self.since_s = inf
            return whole
        messages = [self.messages.popleft() for _ in range(count)]
        places = [self.places.popleft() for _ in range(count)]
        return messages, places


class LiveReader:
    """Reader of several partitions.

    A partition without messages does not delay the others.

    Holds at most `limits.buffer` messages of a partition, plus about one answer of the source; a full partition is not
    read further. For one thread, except `stop`. A source that does not answer is retried for `limits.patience_s`.
    """

    def __init__(
        self, open_client: Callable[[], LiveClient], terms: LiveOptions, order: Callable[[Place], Any], source: str
    ) -> None:
        self._open_client, self._terms, self._order = open_client, terms, order
        self._part = read_part(source)
        self._buffers: dict[int, _Buffer] = {}
        self._client: LiveClient | None = None
        self._closed = threading.Event()

    def open(self, partition: int, place: Any, stop: Any) -> None:
        """Read a partition from `place` up to `stop`; without end for None."""
        self._buffers[partition] = _Buffer(place, stop)
        if self._client is not None:
            try:
                self._client.seek(partition, place)
            except BaseException:
                self._disconnect()  # the next draw connects again, and seeks all partitions
                raise

    def draw(self, partition: int, size: int) -> tuple[list[Any], list[Any]]:
        """Up to `size` messages and their places, when they are due.

        They are due when there are `size` of them, `max_wait_s` after the arrival of the first one, or at the end of
        the partition. The lists are empty if no message is due within `max_wait_s`, if another partition has messages
        that are due, or after `stop()`. The first call for a partition does not wait.
        """
        buffer, wait_s = self._buffers[partition], self._terms.max_wait_s
        # At first the others of this thread may not be open yet, and must not be delayed.
        deadline_s = monotonic() + (0.0 if buffer.is_new else wait_s)
        buffer.is_new = False
        while not self._is_due(buffer, size, now_s := monotonic()) and not self._closed.is_set():
            oldest_s = min(other.since_s for other in self._buffers.values())
            left_s = min(deadline_s, oldest_s + wait_s) - now_s
            if left_s <= 0 or any(
                other.messages and self._is_due(other, size, now_s) for other in self._buffers.values()
            ):
                self._fill(size - len(buffer.messages), 0.0)
                break
            self._fill(size - len(buffer.messages), min(left_s, _LONGEST_POLL_S))
        return buffer.take(size) if self._is_due(buffer, size, monotonic()) else ([], [])

    def put_back(self, partition: int, messages: list[Any], places: list[Any]) -> None:
        """Put drawn messages back, so that they are drawn again."""
        buffer = self._buffers[partition]
        buffer.messages.extendleft(reversed(messages))
        buffer.places.extendleft(reversed(places))
        buffer.since_s = min(buffer.since_s, monotonic())

    def is_at_end(self, partition: int) -> bool:
        """True if all messages before the end were drawn, or after `stop()`."""
        buffer = self._buffers[partition]
        return self._closed.is_set() or (not buffer.messages and self._reaches_stop(buffer, buffer.end))

    def stop(self) -> None:
        """End a waiting draw within `_LONGEST_POLL_S`. Thread-safe."""
        self._closed.set()

    def close(self) -> None:
        """End the waiting draw, and close the connection."""
        self.stop()
        self._disconnect()

    def _is_due(self, buffer: _Buffer, size: int, now_s: float) -> bool:
        if len(buffer.messages) >= size or self._reaches_stop(buffer, buffer.end):
            return True
        return now_s - buffer.since_s >= self._terms.max_wait_s

    def _reaches_stop(self, buffer: _Buffer, place: Any) -> bool:
        if buffer.stop is None:
            return False
        return bool(self._order(place) >= self._order(buffer.stop))

    def _fill(self, most: int, timeout_s: float) -> None:
        limit = self._terms.limits.buffer
        wanted = [
            number
            for number, buffer in self._buffers.items()
            if len(buffer.messages) < limit and not self._reaches_stop(buffer, buffer.end)
        ]
        client = self._connected()
        try:
            with self._part:
                chunks = client.poll(wanted, most, timeout_s)
        except SourceUnavailableError as error:
            self._reconnect(error)
            return
        except BaseException:
            self._disconnect()  # it may have taken messages that it did not return: they are read again
            raise
        now_s = monotonic()
        for chunk in chunks:
            self._add(self._buffers[chunk.partition], chunk, now_s)

    def _add(self, buffer: _Buffer, chunk: Any, now_s: float) -> None:
        messages, places = chunk.messages, chunk.places
        if buffer.stop is not None and places and self._is_past(buffer, places[-1]):
            within = sum(not self._is_past(buffer, place) for place in places)
            messages, places = messages[:within], places[:within]
        if messages and not buffer.messages:
            buffer.since_s = now_s
        buffer.messages.extend(messages)
        buffer.places.extend(places)
        if chunk.places:
            buffer.end = chunk.places[-1]
        if chunk.end is not None:
            buffer.end = chunk.end

    def _is_past(self, buffer: _Buffer, place: Any) -> bool:
        return bool(self._order(place) > self._order(buffer.stop))

    def _connected(self) -> LiveClient:
        if self._client is None:
            client = self._open_client()
            try:
                for number, buffer in self._buffers.items():
                    client.seek(number, buffer.end)
            except BaseException:
                client.close()
                raise
            self._client = client
        return self._client

    def _reconnect(self, error: FeedlineError) -> None:
        """Connect again; raise the latest error after `patience_s`."""
        give_up_s = monotonic() + self._terms.limits.patience_s
        self._disconnect()
        while monotonic() < give_up_s and not self._closed.is_set():
            self._closed.wait(_RETRY_S)
            try:
                self._connected()
                return
            except SourceUnavailableError as again:
                error = again
        raise error

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(FeedlineError):  # it is closed; messages that it did not send are read again
                client.close()
