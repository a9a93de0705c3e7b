"""What a foreign sampler has yielded so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from feedline.samplers.order import Indices

if TYPE_CHECKING:
    from collections.abc import Iterable


class Listing:
    """Items by position: an int64 array that grows, or a list from the first item on that is no integer."""

    def __init__(self) -> None:
        self._numbers: Indices = np.empty(1024, np.int64)
        self._objects: list[Any] | None = None
        self._first = 0  # position of the first item still kept
        self._stop = 0

    def __len__(self) -> int:
        """Items listed so far, those forgotten included."""
        return self._stop

    @property
    def first(self) -> int:
        """Position of the first item that is still kept."""
        return self._first

    def extend(self, items: list[Any] | Indices) -> None:
        """Add items at the end."""
        numbers = items if isinstance(items, np.ndarray) else as_integers(items)
        if self._objects is None and numbers is None:
            self._objects = self._numbers[: self._stop - self._first].tolist()
        if self._objects is not None:
            self._objects.extend(items)
        elif numbers is not None:
            self._append(numbers)
        self._stop += len(items)

    def _append(self, numbers: Indices) -> None:
        kept = self._stop - self._first
        if kept + len(numbers) > len(self._numbers):
            grown = np.empty(max(2 * len(self._numbers), kept + len(numbers)), np.int64)
            grown[:kept] = self._numbers[:kept]
            self._numbers = grown
        self._numbers[kept : kept + len(numbers)] = numbers

    def span(self, start: int, stop: int) -> Indices | list[Any]:
        """A copy of the items at [start, stop); `start` must not have been forgotten."""
        low, high = start - self._first, max(min(stop, self._stop), start) - self._first
        return self._numbers[low:high].copy() if self._objects is None else self._objects[low:high]

    def forget(self, before: int) -> None:
        """Free what lies before that position; cheap, because memory moves only when most of it is free."""
        count = min(before, self._stop) - self._first
        if count < 1024 or 2 * count < self._stop - self._first:
            return
        if self._objects is None:
            self._numbers = np.concatenate([self._numbers[count : self._stop - self._first], np.empty(1024, np.int64)])
        else:
            del self._objects[:count]
        self._first += count


def as_batch(item: Iterable[Any]) -> Indices | list[Any]:
    """A copy of one batch, as int64 where all of it is integers; the sampler may fill the same list again."""
    indices = list(item)
    numbers = as_integers(indices)
    return indices if numbers is None else numbers


def as_integers(items: list[Any]) -> Indices | None:
    """The items as int64, if every one is an integer: Python's, NumPy's, a torch scalar, or a bool of these."""
    if not set(map(type, items)) <= {int, bool}:
        if not all(map(_is_integer, items)):
            return None
        items = [int(item) for item in items]
    try:
        return np.array(items, np.int64)
    except OverflowError:
        return None


def _is_integer(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return item.ndim == 0 and not item.is_floating_point() and not item.is_complex()
    return isinstance(item, (int, np.integer, np.bool_))
