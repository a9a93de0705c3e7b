"""Things that do not survive a fork: connections, threads, locks, a native library's runtime."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that is made on first use, and made anew in every process that inherits it.

    Two threads that come first at the same time may both make it; one of the two results is dropped.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[int, T] | None = None

    def get(self) -> T:
        """The value of this process."""
        made = self._made
        if made is None or made[0] != os.getpid():
            made = self._made = (os.getpid(), self._make())
        return made[1]
