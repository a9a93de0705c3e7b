"""Pieces of an object that are in memory."""

from __future__ import annotations

from collections.abc import Mapping

from feedline.stores.coalescing import joined


class Pieces:
    """`data[number]` are `piece_nbytes` bytes from `number * piece_nbytes` on, fewer at the end of the object."""

    def __init__(self, data: Mapping[int, memoryview], piece_nbytes: int) -> None:
        self._data, self._piece_nbytes = data, piece_nbytes

    def cut(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` up to `stop`, all of which are there: a view if they lie in one piece, else a copy."""
        if start == stop:
            return memoryview(b"")
        size = self._piece_nbytes
        first, last = start // size, (stop - 1) // size
        if first == last:
            return self._data[first][start - first * size : stop - first * size]
        parts = [self._data[number] for number in range(first, last + 1)]
        return joined([parts[0][start - first * size :], *parts[1:-1], parts[-1][: stop - last * size]])
