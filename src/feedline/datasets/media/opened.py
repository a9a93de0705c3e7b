"""Open decoders of each process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar

from feedline.core.caches import PerProcess


class Closable(Protocol):
    def close(self) -> None: ...


D = TypeVar("D", bound=Closable)


class Decoders(Generic[D]):
    """Decoders of numbered files, opened by `opening(number)`.

    At most `most` stay open in each process while no thread uses them; the least recently used one is closed. A forked
    process opens its own, and leaves those of its parent alone. Pickles without them.
    """

    def __init__(self, opening: Callable[[int], D], most: int) -> None:
        self._opening, self._most = opening, most
        self._idle: PerProcess[_Idle[D]] = PerProcess(partial(_Idle, most))

    @contextmanager
    def use(self, number: int) -> Iterator[D]:
        """The decoder of a file, for this thread alone."""
        idle = self._idle()
        decoder = idle.take(number) or self._opening(number)
        try:
            yield decoder
        except BaseException:
            decoder.close()
            raise
        idle.give(number, decoder)

    def open_count(self) -> int:
        """The number of idle decoders of this process."""
        return len(self._idle().entries)

    def __getstate__(self) -> tuple[Callable[[int], D], int]:
        return self._opening, self._most

    def __setstate__(self, state: tuple[Callable[[int], D], int]) -> None:
        self._opening, self._most = state
        self._idle = PerProcess(partial(_Idle, self._most))


class _Idle(Generic[D]):
    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self.entries: list[tuple[int, D]] = []  # the most recently used one last

    def take(self, number: int) -> D | None:
        with self._lock:
            for at, (each, decoder) in enumerate(self.entries):
                if each == number:
                    del self.entries[at]
                    return decoder
        return None

    def give(self, number: int, decoder: D) -> None:
        with self._lock:
            self.entries.append((number, decoder))
            spare = self.entries.pop(0)[1] if len(self.entries) > self._most else None
        if spare is not None:
            spare.close()
