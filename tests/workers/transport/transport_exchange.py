"""Both sides of the transport in one process: messages arrive as from a worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from feedline.workers.transport import MAX_FDS, Arena, Inbox


class Line:
    """An arena and its inbox, with the descriptors duplicated in between as a socket would."""

    def __init__(self, **hooks: Callable[..., object]) -> None:
        self.arena = Arena()
        self.inbox = Inbox(**hooks)

    def carry(self, batch: Any) -> Any:
        return self.inbox.loads(*self.post(batch))

    def post(self, batch: Any) -> tuple[bytes, list[int]]:
        message = self.arena.dumps(batch)
        assert len(message.payload) < 64 * 1024
        assert len(message.fds) <= MAX_FDS
        fds = [os.dup(fd) for fd in message.fds]
        message.sent()
        return message.payload, fds
