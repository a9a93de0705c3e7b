"""A worker on the other side of the transport: a real process, or a thread where no fork is needed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any, Self

import torch

from feedline.workers.transport import MAX_FDS, Arena, ArenaStatistics, Inbox

_WIDTH = 8


class Peer:
    """Starts a worker that answers every number with `make(number, arena)`, through its arena; a context manager."""

    def __init__(self, make: Callable[[int, Arena], Any], *, forked: bool = True) -> None:
        self.inbox = Inbox()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._join = (_fork if forked else _start_thread)(self._channel, theirs, make)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._join()
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


def _fork(ours: socket.socket, theirs: socket.socket, make: Callable[[int, Arena], Any]) -> Callable[[], object]:
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            torch.set_num_threads(1)  # torch's own threads did not survive the fork
            _serve(theirs, make)
            os._exit(0)
        finally:
            os._exit(1)
    theirs.close()
    return lambda: os.waitpid(pid, 0)


def _start_thread(_: socket.socket, theirs: socket.socket, make: Callable[[int, Arena], Any]) -> Callable[[], object]:
    thread = threading.Thread(target=_serve, args=(theirs, make))
    thread.start()
    return thread.join


def _serve(channel: socket.socket, make: Callable[[int, Arena], Any]) -> None:
    arena = Arena()
    with channel:
        while order := channel.recv(_WIDTH):
            number = int.from_bytes(order, "big", signed=True)
            message = arena.dumps(arena.statistics() if number < 0 else make(number, arena))
            socket.send_fds(channel, [message.payload], message.fds)
            message.sent()
