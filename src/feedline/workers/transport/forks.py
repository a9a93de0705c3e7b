"""Copies of delivered batches for processes that the user forks.

Batches are in memory that a worker and the training process share. A forked child would share it, too, and see later
writes of the training process. The child therefore replaces that memory by private copies at the same addresses.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from feedline.core.descriptors import Descriptors, pipe
from feedline.workers.transport.memory import make_private
from feedline.workers.transport.views import Bytes

_COPY_S = 20.0
"""Longest wait of a fork for the child's copies, in seconds: the child may have been killed."""


_PRUNE_AT = 64


class ForkRecord:
    """Forks of this process, and the memory of delivered batches.

    Batches that the loop has not received yet are left out: a child cannot reach them.
    """

    def __init__(self) -> None:
        self.count = 0
        """Forks so far."""
        self._delivered: list[weakref.ref[Bytes]] = []
        self._local = threading.local()

    def add_delivered(self, slots: Iterable[weakref.ref[Bytes]]) -> None:
        """Record the slots of a batch that is delivered to the loop."""
        self._delivered.extend(slots)
        if len(self._delivered) > _PRUNE_AT + 2 * len(self._live()):
            self._delivered = [slot for slot in self._delivered if slot() is not None]

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Let children that this thread forks share delivered batches.

        Workers share the batches, as in torch.
        """
        self._local.shares = True
        try:
            yield
        finally:
            self._local.shares = False

    def before(self) -> None:
        """Open a pipe for the child's report, if batches must be copied."""
        shares = getattr(self._local, "shares", False)
        self._local.pipe = pipe() if self._live() and not shares else None

    def after_in_parent(self) -> None:
        """Wait until the child has copied the batches, or 20 seconds.

        Before the copies exist, this process must not write to its batches.
        """
        self.count += 1
        if ends := self._take_pipe():
            reading, writing = ends
            writing.close()
            with reading:
                poll = select.poll()
                poll.register(reading.fd, select.POLLIN)
                poll.poll(_COPY_S * 1000)  # also the end of the pipe, if the child was killed

    def after_in_child(self) -> None:
        """Replace the memory of all delivered batches by private copies."""
        if ends := self._take_pipe():
            for memory in self._live():
                make_private(memory)
            reading, writing = ends
            with reading, writing:
                # Not the end of the pipe: a child that another thread forks at the same time may hold it open.
                os.write(writing.fd, b".")
        self._delivered = []

    def _take_pipe(self) -> tuple[Descriptors, Descriptors] | None:
        # Per thread: two may fork at once.
        ends: tuple[Descriptors, Descriptors] | None = getattr(self._local, "pipe", None)
        self._local.pipe = None
        return ends

    def _live(self) -> list[Bytes]:
        return [memory for slot in list(self._delivered) if (memory := slot()) is not None]


forks = ForkRecord()
"""Record of this process."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=forks.before, after_in_parent=forks.after_in_parent, after_in_child=forks.after_in_child)
