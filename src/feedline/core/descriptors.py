"""File descriptors that have an owner as soon as they exist.

Python runs handlers of signals between its instructions, also between the call that makes a descriptor and the one that
stores it. If the handler raises, such as the handler of Ctrl-C, no object owns the descriptor. Here, both happen within
one call of a C function, and so do the steps of closing.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat, starmap
from operator import attrgetter, neg
from typing import Any, Self


def releaser(release: Callable[..., object], held: list[int], *arguments: object) -> Callable[[], object]:
    """Callable that passes each element of `held` to a C function.

    It removes the element in the same step.
    """
    # Each of these iterators is implemented in C, so the interpreter takes no step between `pop` and `release`.
    firsts = map(held.pop, map(neg, iter(held.__len__, 0)))
    return partial(deque[None], map(release, firsts, *map(repeat, arguments)), 0)


class Descriptors:
    """File descriptors, closed with this object at the latest.

    `made` may be lazy, and must not run Python code: it is iterated by a C function.
    """

    __slots__ = ("_close", "_fds")

    def __init__(self, made: Iterable[int] = ()) -> None:
        fds = self._fds = list[int]()
        self._close = releaser(os.close, fds)
        fds.extend(made)

    # The finalizer that Python finds here is the releaser itself. A method would be Python code, which an interrupt may
    # end before its first line.
    __del__ = property(attrgetter("_close"))

    def __len__(self) -> int:
        return len(self._fds)

    def __iter__(self) -> Iterator[int]:
        return iter(self._fds)

    @property
    def fd(self) -> int:
        """The first descriptor; -1 if there is none, as after `close`."""
        return self._fds[0] if self._fds else -1

    def take(self, count: int) -> Descriptors:
        """Move the first `count` descriptors to a new owner."""
        return Descriptors(map(self._fds.pop, repeat(0, count)))

    def disown(self) -> list[int]:
        """Give up all descriptors, and return them."""
        fds = list(self._fds)
        self._fds.clear()
        return fds

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def opened(call: Callable[..., int], *arguments: Any) -> Descriptors:
    """The descriptor that a C function returns, such as `os.dup`."""
    return Descriptors(starmap(call, [arguments]))


def pipe() -> tuple[Descriptors, Descriptors]:
    """Reading and writing end of a new pipe."""
    ends = Descriptors(chain.from_iterable(starmap(os.pipe, [()])))
    return ends.take(1), ends
