"""A file for libraries that read files, of which the parts that they will ask for were read before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from feedline.datasets.uncached import Read, Span


def joined(spans: Sequence[Span]) -> list[Span]:
    """The spans in order, those that touch or overlap as one."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


class SparseFile:
    """`nbytes` bytes, of which `spans` (in order, apart from each other) are read at once, the rest when asked for."""

    def __init__(self, nbytes: int, spans: Sequence[Span], read: Read) -> None:
        self._nbytes, self._read = nbytes, read
        self._starts, self._views = [start for start, _ in spans], read(spans)
        self._at = 0
        self.closed = False

    def read(self, nbytes: int = -1) -> memoryview:
        """The next bytes: a view of what was read, unless they do not lie in one span."""
        start = self._at
        stop = self._nbytes if nbytes < 0 else min(start + nbytes, self._nbytes)
        self._at = stop = max(start, stop)
        number = bisect_right(self._starts, start) - 1
        if number >= 0:
            first, view = self._starts[number], self._views[number]
            if stop <= first + len(view):
                return view[start - first : stop - first]
        return self._read([(start, stop)])[0]

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place that counts from the beginning (0), from here (1), or from the end (2)."""
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def writable(self) -> bool:
        """It is not."""
        return False

    def close(self) -> None:
        """Let go of what was read."""
        self.closed, self._starts, self._views = True, [], []


def end_to_end(views: Sequence[memoryview]) -> SparseFile:
    """A file that holds these one after the other; a part of one is read without a copy."""
    stops = list(accumulate(map(len, views)))
    spans = [(stop - len(view), stop) for stop, view in zip(stops, views, strict=True)]
    return SparseFile(stops[-1], spans, lambda _: list(views))
