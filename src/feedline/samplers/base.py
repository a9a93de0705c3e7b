"""What every sampler here is: an order with random access that is also a plain torch sampler."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from feedline.errors import ArgumentError
from feedline.samplers import _arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Indices = NDArray[np.int64]


LONGEST = 1 << 62
"""No epoch is longer than this: positions and places stay within int64, sums of two included."""


_LARGEST_BLOCK = 4096


_WIDEST = {"i": "<i8", "f": "<f8"}  # equal numbers have equal digests, whatever they were stored in


class IndexSampler(Sampler[int]):
    """An order of indices, addressed by (epoch, position).

    Subclasses set `_length` (None: endless) and give `_take` and `fingerprint`. The length never depends on the epoch.
    """

    epoch: int = 0
    """The epoch that `iter()` gives; `take` does not look at it."""

    extent: int | None = None
    """Every index is below it; None where the sampler cannot know how many samples the dataset has."""

    _length: int | None
    _begun: int = 0

    def upcoming(self, following: int) -> int:
        """The epoch that a loader reads next: one set by hand since the last was begun, else `following`."""
        return self.epoch if self.epoch != self._begun else following

    def begin(self, epoch: int) -> None:
        """A loader begins to read `epoch`."""
        self.epoch = self._begun = epoch

    def take(self, epoch: int, start: int, stop: int) -> Indices:
        """The indices at positions [start, stop) of `epoch`: a new array, shorter (or empty) past the end.

        A pure function: any way to cut an epoch into spans gives the same indices.
        """
        start, stop = clipped(start, stop, self._length)
        return self._take(epoch, start, stop) if start < stop else np.empty(0, np.int64)

    def _take(self, epoch: int, start: int, stop: int) -> Indices:
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Short text that names the class and whatever decides the order."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` gives."""
        self.epoch = _arguments.integer("epoch", epoch, 0)

    def __iter__(self) -> Iterator[int]:
        return self._integers(self.epoch)

    def _integers(self, epoch: int) -> Iterator[int]:
        start, size = 0, 64  # small at first: the first index is there at once
        while len(block := self.take(epoch, start, start + size)) == size:
            yield from block.tolist()
            start, size = start + size, min(2 * size, _LARGEST_BLOCK)
        yield from block.tolist()

    def __len__(self) -> int:
        return _known(self, self._length)


class BatchIndexSampler(Sampler[list[int]]):
    """An order of batches of indices, addressed by (epoch, number of the batch); torch's `batch_sampler=` accepts it.

    Subclasses set `_length` and give `_take` and `fingerprint`. The length never depends on the epoch.
    """

    epoch: int = 0
    """The epoch that `iter()` gives; `take_batches` does not look at it."""

    _length: int
    _begun: int = 0

    def upcoming(self, following: int) -> int:
        """As `IndexSampler.upcoming`."""
        return self.epoch if self.epoch != self._begun else following

    def begin(self, epoch: int) -> None:
        """As `IndexSampler.begin`."""
        self.epoch = self._begun = epoch

    def take_batches(self, epoch: int, start: int, stop: int) -> list[Indices]:
        """The batches [start, stop) of `epoch`, fewer (or none) past the end; pure, as `IndexSampler.take`."""
        start, stop = clipped(start, stop, self._length)
        return self._take(epoch, start, stop) if start < stop else []

    def _take(self, epoch: int, start: int, stop: int) -> list[Indices]:
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Short text that names the class and whatever decides the order."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` gives."""
        self.epoch = _arguments.integer("epoch", epoch, 0)

    def __iter__(self) -> Iterator[list[int]]:
        return self._lists(self.epoch)

    def _lists(self, epoch: int) -> Iterator[list[int]]:
        for number in range(self._length):
            yield self.take_batches(epoch, number, number + 1)[0].tolist()

    def __len__(self) -> int:
        return self._length


class RecentResults:
    """The latest few results of a pure function of integers; they stay behind when it is pickled."""

    __slots__ = ("_keep", "_make", "_results")

    def __init__(self, make: Callable[..., Any], keep: int = 2) -> None:
        self._make = make
        self._keep = keep
        self._results: dict[tuple[int, ...], Any] = {}

    def __call__(self, *key: int) -> Any:
        """`make(*key)`, shared with earlier callers: not to be written to."""
        result = self._results.get(key)
        if result is None:
            result = self._make(*key)
            self._results = dict([*self._results.items(), (key, result)][-self._keep :])
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return RecentResults, (self._make, self._keep)


def blockwise(block: Callable[[int], Indices], size: int, start: int, stop: int) -> Indices:
    """A new array of the elements [start, stop) of what `block(0)`, `block(1)`, ... give, `size` elements each."""
    return np.concatenate(
        [
            block(number)[max(start - number * size, 0) : stop - number * size]
            for number in range(start // size, (stop - 1) // size + 1)
        ]
    )


def clipped(start: int, stop: int, length: int | None) -> tuple[int, int]:
    """The span as Python ints, cut to `length`; refuses a negative start."""
    if start < 0:
        raise ArgumentError(f"a span of positions starts at 0 or above, but start is {start}")
    return int(start), int(stop if length is None else min(stop, length))


def describe(sampler: Any, /, **deciding: object) -> str:
    """`Class(name=value, ...)`, made once for each sampler; arrays and tuples are told by count and digest."""
    if "_description" not in vars(sampler):
        parts = (f"{name}={_told(value)}" for name, value in deciding.items())
        sampler._description = f"{type(sampler).__name__}({', '.join(parts)})"
    description: str = sampler._description
    return description


def _told(value: object) -> str:
    if isinstance(value, (IndexSampler, BatchIndexSampler)):
        return value.fingerprint()
    if isinstance(value, tuple):
        return _digest(len(value), ", ".join(map(_told, value)).encode())
    if isinstance(value, np.ndarray):
        wide = value.astype(_WIDEST.get(value.dtype.kind, value.dtype))
        return _digest(len(value), repr(wide.tolist()).encode() if wide.dtype.kind == "O" else wide.tobytes())
    return repr(value)


def _digest(count: int, content: bytes) -> str:
    return f"<{count}:{hashlib.blake2b(content, digest_size=8).hexdigest()}>"


def _known(sampler: object, length: int | None) -> int:
    if length is None:
        raise TypeError(f"{type(sampler).__name__} is endless and has no length: stop the loop by a number of steps")
    return length
