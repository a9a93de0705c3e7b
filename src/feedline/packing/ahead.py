"""Work done on several threads, its results taken in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Ahead(Generic[T, R]):
    """`work(item)` for each item, a bounded number of items ahead; a block that joins its threads when it is left."""

    def __init__(self, work: Callable[[T], R], items: Iterable[T], threads: int) -> None:
        self._work, self._items = work, iter(items)
        self._pool = ThreadPoolExecutor(threads, "feedline-pack")
        self._window = deque[Future[R]]()
        self._submit(3 * threads)

    def __iter__(self) -> Iterator[R]:
        """The results that are left, each taken off when the next is asked for."""
        while self._window:
            yield self.head()
            self.advance()

    def __bool__(self) -> bool:
        return bool(self._window)

    def head(self) -> R:
        """The result of the first item that has not been taken off; what `work` raised is raised."""
        return self._window[0].result()

    def advance(self) -> None:
        """Take the first off."""
        self._window.popleft()
        self._submit(1)

    def _submit(self, number: int) -> None:
        self._window.extend(self._pool.submit(self._work, item) for item in islice(self._items, number))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
