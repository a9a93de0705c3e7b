"""Chunks whose rows lie in other chunks: behind the numbers of a dictionary, or in one of several parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from feedline.datasets.chunks import DictionaryChunk, Items, PartedChunk, items, nothing
from feedline.datasets.kinds import Kind
from feedline.datasets.spans import Int64s, Span

Redirection = Callable[[Int64s, Int64s], tuple[Int64s, Int64s]]
"""From the chunks that rows lie in, and the rows, to those of the other chunks."""
Wrong = Callable[[int, str], Exception]
"""What to raise: which of the rows that are asked for it is, and what is wrong with it."""


class Redirected(NamedTuple):
    """Other chunks, and where rows lie in them."""

    chunks: Sequence[Any]
    redirection: Redirection


def redirected(kind: Kind, chunks: Sequence[Any], wrong: Wrong) -> Redirected | None:
    """The chunks that hold the rows of these; None if these do."""
    found = set(map(type, chunks))  # there may be thousands, and almost never one of these
    if PartedChunk in found:
        parts = [list(chunk.parts) if isinstance(chunk, PartedChunk) else [chunk] for chunk in chunks]
        return Redirected(list(chain.from_iterable(parts)), _Parts(chunks))
    if DictionaryChunk in found:
        values = [chunk.values if isinstance(chunk, DictionaryChunk) else chunk for chunk in chunks]
        redirection = _Dictionaries(chunks, wrong)
        return Redirected([*values, nothing(kind, 1)] if redirection.has_nulls else values, redirection)
    return None


class _Parts:
    """Rows of chunks of which some come in parts."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._bounds = [chunk.bounds if isinstance(chunk, PartedChunk) else None for chunk in chunks]
        counts = [1 if bounds is None else len(bounds) - 1 for bounds in self._bounds]
        self._first = np.cumsum([0, *counts])

    def __call__(self, which: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
        parts, places = self._first[which], rows.copy()
        for number in np.unique(which).tolist():
            bounds = self._bounds[number]
            if bounds is not None:
                mine = np.flatnonzero(which == number)
                at = np.searchsorted(bounds, rows[mine], side="right") - 1
                parts[mine] += at
                places[mine] -= bounds[at]
        return parts, places


class _Dictionaries:
    """Rows of chunks of which some are numbers of values; nulls are in one that comes behind all values."""

    def __init__(self, chunks: Sequence[Any], wrong: Wrong) -> None:
        coded = [chunk for chunk in chunks if isinstance(chunk, DictionaryChunk)]
        self._number = np.array([isinstance(chunk, DictionaryChunk) for chunk in chunks]).cumsum() - 1
        self._plain = np.array([not isinstance(chunk, DictionaryChunk) for chunk in chunks])
        self._codes = _span([chunk.places for chunk in coded])
        self._lengths = np.array([chunk.length for chunk in coded])
        self._lowest = -np.array([chunk.has_nulls for chunk in coded], np.int64)
        self.has_nulls, self._has_plain = bool(self._lowest.any()), bool(self._plain.any())
        self._wrong = wrong

    def __call__(self, which: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
        if not self._has_plain:
            return self._found(which, which, rows)
        coded = np.flatnonzero(~self._plain[which])
        chunks, places = which.copy(), rows.copy()
        chunks[coded], places[coded] = self._found(which[coded], self._number[which[coded]], rows[coded], coded)
        return chunks, places

    def _found(
        self, which: Int64s, numbers: Int64s, rows: Int64s, asked: Int64s | None = None
    ) -> tuple[Int64s, Int64s]:
        """Where the values of rows lie, all of which are coded; `asked` are the places of these among all rows."""
        found = self._codes.at(numbers, rows).astype(np.int64)
        outside = found >= self._lengths[numbers]
        outside |= found < (self._lowest[numbers] if self.has_nulls else 0)
        if outside.any():
            at = int(outside.argmax())
            raise self._wrong(
                at if asked is None else int(asked[at]),
                f"is value {found[at]} of a dictionary of {self._lengths[numbers[at]]}: the file is damaged; write it"
                " again, or leave it out",
            )
        if not self.has_nulls:
            return which, found
        return np.where(found < 0, len(self._plain), which), np.maximum(found, 0)


def _span(codes: Sequence[Items]) -> Span:
    """In some chunks codes may be wider than in others."""
    dtypes = {each.array.dtype for each in codes}
    if len(dtypes) == 1:
        return Span(codes, dtypes.pop())
    return Span([items(each.array.astype(np.int64)) for each in codes], np.dtype(np.int64))
