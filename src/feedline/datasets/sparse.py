"""A file for libraries that read files, of which the parts that they will ask for were read before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from feedline.datasets.range_file import RangeFile, ReadSpans
from feedline.datasets.uncached import Read
from feedline.stores.protocol import Range


def joined(spans: Sequence[Range]) -> list[Range]:
    """The spans in order, those that touch or overlap as one."""
    found: list[Range] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


class SparseFile(RangeFile):
    """`nbytes` bytes, of which `spans` (in order, apart from each other) are read at once, the rest when asked for.

    What is read is a view of what was read before, unless it does not lie in one span.
    """

    def __init__(self, nbytes: int, spans: Sequence[Range], read: Read) -> None:
        super().__init__(nbytes)
        self._ask, self._held = read, ReadSpans(spans, read(spans))

    def _bytes(self, start: int, stop: int) -> memoryview:
        held = self._held.cut(start, stop)
        return self._ask([(start, stop)])[0] if held is None else held

    def close(self) -> None:
        """Let go of what was read."""
        super().close()
        self._held = ReadSpans()


def end_to_end(views: Sequence[memoryview]) -> SparseFile:
    """A file that holds these one after the other; a part of one is read without a copy."""
    stops = list(accumulate(map(len, views)))
    spans = [(stop - len(view), stop) for stop, view in zip(stops, views, strict=True)]
    return SparseFile(stops[-1], spans, lambda _: list(views))
