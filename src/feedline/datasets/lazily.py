"""A sequence of parts that are made when they are asked for, and not all kept: open files."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from feedline.per_process import PerProcess
from feedline.stores.recent import Recent

T = TypeVar("T")


class Lazily(Generic[T]):
    """`parts[number]` is `making(number)`; the parts that were used last are kept, as many as may be open at once.

    Each process has its own. Two threads that come first may both make a part. Pickles as `making` alone.
    """

    def __init__(self, making: Callable[[int], T], count: int) -> None:
        self._making, self._count = making, count
        self._kept: PerProcess[Recent[int, T]] = PerProcess(partial(Recent, _open_at_once()))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> T:
        kept = self._kept()
        made = kept.get(number)
        return kept.put(number, self._making(number)) if made is None else made

    def __reduce__(self) -> tuple[Any, ...]:
        return Lazily, (self._making, self._count)


def _open_at_once() -> int:
    """A share of the descriptors that the process may have: a mapped file holds one, a part up to two."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if limit == resource.RLIM_INFINITY else min(max(limit // 8, 16), 4096)
