"""A real worker process on the other side of the transport."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Self

import torch

from feedline.workers.transport import MAX_FDS, Arena, ArenaStatistics, Inbox

_WIDTH = 8


class Peer:
    """Forks a worker that answers every number with `make(number, arena)`, through its arena; a context manager."""

    def __init__(self, make: Callable[[int, Arena], Any]) -> None:
        self.inbox = Inbox()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._channel.close()
            try:
                _serve(theirs, make)
            finally:
                os._exit(1)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        os.waitpid(self._pid, 0)
        self.inbox.close()

    def ask(self, number: int = 0) -> Any:
        self._channel.send(number.to_bytes(_WIDTH, "big", signed=True))
        payload, fds, _, _ = socket.recv_fds(self._channel, 1 << 16, MAX_FDS)
        return self.inbox.loads(payload, fds)

    def statistics(self) -> ArenaStatistics:
        """The arena's, not counting this answer."""
        statistics = self.ask(-1)
        assert isinstance(statistics, ArenaStatistics)
        return statistics


def _serve(channel: socket.socket, make: Callable[[int, Arena], Any]) -> None:
    torch.set_num_threads(1)  # torch's own threads did not survive the fork
    arena = Arena()
    while order := channel.recv(_WIDTH):
        number = int.from_bytes(order, "big", signed=True)
        message = arena.dumps(arena.statistics() if number < 0 else make(number, arena))
        socket.send_fds(channel, [message.payload], message.fds)
        message.sent()
    os._exit(0)
