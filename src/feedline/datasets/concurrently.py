"""Work done by several threads at once, its results in order, no more of it ahead than fits into memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from feedline.cancelling import DaemonPool
from feedline.per_process import PerProcess

T = TypeVar("T")

_AT_ONCE = 32


class Concurrently:
    """Threads of this process, made on first use; they end when this is dropped. Pickles without them."""

    def __init__(self) -> None:
        self._pool = PerProcess(partial(DaemonPool, _AT_ONCE, "feedline-dataset"))

    def map(
        self, work: Callable[[int], T], numbers: Iterable[int], nbytes: Callable[[int], int], limit_nbytes: int
    ) -> Iterator[T]:
        """`work` of each number, in order; what is begun ahead of the result that is asked for fits into the limit.

        `nbytes` is what a result takes. The first failure is raised, and what has not begun is left undone.
        """
        begun: deque[tuple[Future[T], int]] = deque()
        ahead = 0
        try:
            for number in numbers:
                size = nbytes(number)
                while begun and (ahead + size > limit_nbytes or len(begun) >= _AT_ONCE):
                    future, released = begun.popleft()
                    ahead -= released
                    yield future.result()
                begun.append((self._pool().submit(work, number), size))
                ahead += size
            while begun:
                yield begun.popleft()[0].result()
        finally:
            for future, _ in begun:
                future.cancel()
