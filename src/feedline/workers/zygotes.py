"""Workers forked from a zygote: nothing is inherited from the training process, and a new one takes milliseconds."""

from __future__ import annotations

import os
import pickle
import select
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from feedline.errors import WorkerError
from feedline.transport import Frozen, freeze
from feedline.workers import nursery, wire
from feedline.workers.crews import ZygoteCrew
from feedline.workers.surroundings import Surroundings
from feedline.workers.zygote import Origin, Work

_ANSWER_S = 0.5


class ZygoteLauncher:
    """Freezes the builder once, and has a zygote that thaws it once. Raises NotPicklableError.

    The zygote is forked when the first crew is asked for, and ends when this and all of its crews are closed. If it, or
    the nursery, is killed, the next crew gets a new one.
    """

    def __init__(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> None:
        self.builder = builder
        self._frozen = freeze(Work(builder, init_fn), "loader")
        self._zygote: _Zygote | None = None
        self._crews: weakref.WeakSet[ZygoteCrew] = weakref.WeakSet()
        self._closed = False
        nursery.close_at_exit(self)

    def serves(self, builder: Any, init_fn: Callable[[int], object] | None = None) -> bool:
        """Whether workers of this launcher are what workers of a new one would be: every byte is compared."""
        return self._frozen.matches(Work(builder, init_fn))

    def crew(self) -> ZygoteCrew:
        """A new, empty crew. Does not wait for the zygote."""
        if self._closed:
            raise WorkerError("the process that forked these workers is gone, and the loader has begun anew since")
        if self._zygote is None or not self._zygote.is_ours():
            self._zygote = _Zygote(self._frozen)
        try:
            crew = self._zygote.crew()
        except ConnectionError:
            self._zygote.close(kill=True)
            self._zygote = _Zygote(self._frozen)
            crew = self._zygote.crew()
        self._crews.add(crew)
        return crew

    def close(self) -> None:
        """See `Launcher`; forgets the frozen builder."""
        self._closed = True
        zygote, self._zygote = self._zygote, None
        if zygote is not None and zygote.is_ours():
            zygote.close(kill=all(crew.lost for crew in self._crews))
        self._frozen.close()


class _Zygote:
    """A zygote, from its launcher's point of view."""

    def __init__(self, frozen: Frozen) -> None:
        self._owner = os.getpid()
        self._control, theirs = wire.pair()
        letter = wire.spill(pickle.dumps(Origin(Surroundings.here(), frozen.skeleton)))
        own = [letter, _standard_stream(1), _standard_stream(2)]
        try:
            self._nursery, self._number = nursery.fork([theirs.fileno(), *own, *frozen.fds])
        finally:
            wire.close_all(own)
            theirs.close()

    def is_ours(self) -> bool:
        """False in a child of the user's, which must not talk to its parent's zygote."""
        return self._owner == os.getpid()

    def crew(self) -> ZygoteCrew:
        mine, theirs = wire.pair()
        with theirs:
            try:
                wire.send(self._control, [b"crew"], [theirs.fileno()])
            except ConnectionError:
                mine.close()
                raise
        return ZygoteCrew(mine)

    def close(self, *, kill: bool) -> None:
        """Have it end once its crews are closed; at once, by force, if it is not to be waited for and gives no sign.

        It gives none while it unpickles a dataset, which may take long.
        """
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        if kill and not poll.poll(_ANSWER_S * 1000):
            self._nursery.kill(self._number)
        self._control.close()


def _standard_stream(fd: int) -> int:
    """A copy of standard output or error; where this process has closed it, a hole."""
    try:
        return os.dup(fd)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
