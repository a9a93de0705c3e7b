"""Near ranges become one request, far and large ones many."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from feedline.errors import ArgumentError
from feedline.stores.problems import RangeError
from feedline.stores.protocol import Span


@dataclass(frozen=True, slots=True)
class Requests:
    """How ranges become requests."""

    at_once: int = 64
    """Requests in flight, for each store and process."""
    gap_nbytes: int = 128 << 10
    """Ranges of one object that are at most this far apart are read by one request, and the gap is thrown away."""
    largest_nbytes: int = 8 << 20
    """Ranges are not joined beyond this size, and a longer range is read by several requests at once."""

    def __post_init__(self) -> None:
        if self.at_once < 1 or self.gap_nbytes < 0 or self.largest_nbytes < 1:
            raise ArgumentError(f"{self}: at_once and largest_nbytes are at least 1, gap_nbytes at least 0")


def spans_for(ranges: Sequence[tuple[int, int]], requests: Requests) -> list[Span]:
    """What to ask for so that every range lies within one span, or is the concatenation of several; sorted by start."""
    spans: list[Span] = []
    for start, stop in sorted({(start, stop) for start, stop in ranges if start < stop}):
        if spans and _joins(spans[-1], start, stop, requests):
            spans[-1] = Span(spans[-1].start, max(spans[-1].stop, stop))
        else:
            spans.append(Span(start, stop))
    return [part for span in spans for part in _parts(span, requests.largest_nbytes)]


def are_many(ranges: Sequence[tuple[int, int]], requests: Requests) -> bool:
    """Whether they take more requests than are sent at once: few are, and a wrong index soon asks for exabytes.

    Then the size of the object is worth a request, before anything is made for each of the others.
    """
    return sum(stop - start for start, stop in ranges) > requests.at_once * requests.largest_nbytes


def refuse_backwards(ranges: Sequence[tuple[int, int]], what: str) -> None:
    """ArgumentError for a range that ends before it starts, or starts before the object."""
    for start, stop in ranges:
        if not 0 <= start <= stop:
            raise ArgumentError(f"{what}: bytes [{start}, {stop}) are no range")


def refuse_beyond(ranges: Sequence[tuple[int, int]], size: int, what: str) -> None:
    """RangeError for a range that reaches past the end of an object."""
    for start, stop in ranges:
        if stop > size:
            raise RangeError(f"{what}, bytes [{start}, {stop}): the object has only {size} bytes")


def _joins(span: Span, start: int, stop: int, requests: Requests) -> bool:
    if start < span.stop:
        return True  # what overlaps is read once
    return start - span.stop <= requests.gap_nbytes and stop - span.start <= requests.largest_nbytes


def _parts(span: Span, largest: int) -> list[Span]:
    """Equal parts, none of them larger than `largest`."""
    count = -(-span.nbytes // largest)
    size = -(-span.nbytes // count)
    return [Span(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size)]


class Answers:
    """What was read for the spans of some ranges."""

    def __init__(self, spans: Sequence[Span], data: Sequence[memoryview]) -> None:
        self._spans = spans
        self._data = data
        self._starts = [span.start for span in spans]

    def cut(self, start: int, stop: int) -> memoryview:
        """The bytes of one of the ranges: a view if they lie within one span, else a copy."""
        if start == stop:
            return memoryview(b"")
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, stop, lo=max(first, 0))
        pieces = [
            self._data[at][max(start - self._starts[at], 0) : stop - self._starts[at]] for at in range(first, last)
        ]
        return pieces[0] if len(pieces) == 1 else joined(pieces)


def joined(pieces: Sequence[memoryview]) -> memoryview:
    """One read-only copy of several views, end to end."""
    whole, at = bytearray(sum(piece.nbytes for piece in pieces)), 0
    for piece in pieces:
        whole[at : at + piece.nbytes] = piece
        at += piece.nbytes
    return memoryview(whole).toreadonly()
