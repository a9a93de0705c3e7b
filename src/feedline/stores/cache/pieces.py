"""Pieces of an object that are in memory."""

from __future__ import annotations

from collections.abc import Callable

from feedline.stores.coalescing import joined


class MissingPieceError(Exception):
    """A piece is not in memory. Whoever asked for it reads it instead."""


class Pieces:
    """Pieces of `piece_nbytes` bytes, fewer at the end of the object, as `find` gives them by number; None for others.

    Those that were found are held. For one thread.
    """

    def __init__(self, find: Callable[[int], memoryview | None], piece_nbytes: int) -> None:
        self._find, self._piece_nbytes = find, piece_nbytes
        self._found: dict[int, memoryview] = {}

    def cut(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` up to `stop`, within the object: a view if they lie in one piece, else a copy."""
        if start == stop:
            return memoryview(b"")
        size = self._piece_nbytes
        first, last = start // size, (stop - 1) // size
        if first == last:
            return self._piece(first)[start - first * size : stop - first * size]
        parts = [self._piece(number) for number in range(first, last + 1)]
        return joined([parts[0][start - first * size :], *parts[1:-1], parts[-1][: stop - last * size]])

    def _piece(self, number: int) -> memoryview:
        data = self._found.get(number)
        if data is None:
            data = self._find(number)
            if data is None:
                raise MissingPieceError
            self._found[number] = data
        return data
