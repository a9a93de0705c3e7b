"""Requests on their way to the workers: whoever is idle takes the next one, without a dispatcher in between."""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import NamedTuple, Self

from feedline.workers import wire

_HEADER = struct.Struct("<q")
LEAVE = 0
"""The task that asks the worker which takes it to leave."""


class Order(NamedTuple):
    """A request as a worker takes it: the number of its task, and the pickled request."""

    task: int
    payload: bytes


class Outlet:
    """One queue of requests, read by one or more workers through `fd`. It outlives them: unread requests stay.

    `put` never blocks: what the socket does not take waits here for the next `flush`. That is enough, because a full
    socket means workers that have yet to answer, and each answer is an occasion to flush.
    """

    def __init__(self) -> None:
        self._mine, self._theirs = wire.pair()
        self._mine.setblocking(False)
        self._backlog: deque[Order] = deque()
        self._post: wire.Post | None = None

    @property
    def fd(self) -> int:
        """The workers' end."""
        return self._theirs.fileno()

    def put(self, task: int, payload: bytes) -> None:
        """Hand in a request."""
        self._backlog.append(Order(task, payload))
        if len(self._backlog) == 1:
            self.flush()

    def leave(self) -> None:
        """Ask one worker to leave; which one is decided by who is idle first."""
        self.put(LEAVE, b"")

    def flush(self) -> None:
        """Send as much as the socket takes."""
        backlog = self._backlog
        while backlog:
            try:
                self._send(backlog[0])
            except BlockingIOError:
                return
            backlog.popleft()

    def withdraw(self) -> None:
        """Take out again every request that no worker has taken yet; wishes to leave stay."""
        if self._post is None:
            self._post = wire.Post()
        leaving = sum(order.task == LEAVE for order in self._backlog)
        self._backlog.clear()
        while True:
            try:
                message, fds = self._post.receive(self._theirs, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            wire.close_all(fds)
            leaving += _task(message) == LEAVE
        for _ in range(leaving):
            self.leave()

    def finish(self) -> None:
        """Let the workers see the end after what they have yet to read."""
        wire.hang_up(self._mine)
        self._theirs.close()

    def close(self) -> None:
        """Drop what is unread, and let every worker see the end."""
        self.withdraw()
        self.finish()

    def _send(self, order: Order) -> None:
        if len(order.payload) <= wire.SPILL_NBYTES:
            self._mine.send(_HEADER.pack(order.task) + order.payload)
            return
        fd = wire.spill(order.payload)
        try:
            wire.send(self._mine, [_HEADER.pack(order.task)], [fd])
        finally:
            wire.close_all([fd])


class Intake:
    """A worker's end of an outlet."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._post = wire.Post()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def take(self) -> Order | None:
        """Wait for a request; None when the pool has closed."""
        message, fds = self._post.receive(self._socket)
        if not message:
            return None
        return Order(_task(message), wire.slurp(fds[0]) if fds else message[_HEADER.size :])


def _task(message: bytes) -> int:
    (task,) = _HEADER.unpack_from(message)
    return int(task)
