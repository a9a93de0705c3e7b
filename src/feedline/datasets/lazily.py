"""A sequence of parts that are made when they are asked for, and not all kept: open files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from feedline.per_process import PerProcess
from feedline.stores.blobs import open_at_once
from feedline.stores.recent import Recent

T = TypeVar("T")


class Lazily(Generic[T]):
    """`parts[number]` is `making(number)`; the `most` that were used last are kept, by default all that may be open.

    Each process has its own. Two threads that come first may both make a part. Pickles as `making` alone.
    """

    def __init__(self, making: Callable[[int], T], count: int, most: int | None = None) -> None:
        self._making, self._count, self._most = making, count, most
        self._kept: PerProcess[Recent[int, T] | _All[T]] = PerProcess(partial(_kept, count, most))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> T:
        kept = self._kept()
        made = kept.get(number)
        return kept.put(number, self._making(number)) if made is None else made

    def __reduce__(self) -> tuple[Any, ...]:
        return Lazily, (self._making, self._count, self._most)


class _All(dict[int, T]):
    """As `Recent`, without a limit, at a fraction of its price."""

    def put(self, key: int, value: T) -> T:
        self[key] = value
        return value


def _kept(count: int, most: int | None) -> Recent[int, Any] | _All[Any]:
    limit = open_at_once() if most is None else most
    return _All() if count <= limit else Recent(limit)
