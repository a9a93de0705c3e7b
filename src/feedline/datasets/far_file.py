"""A blob as the file that a library reads: by blocks where it looks around, from what was fetched where it reads data.

The library may hold a lock while it reads. h5py does, and takes it for every object of its own that is collected: so
nothing may be collected while a read waits for other threads.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from feedline.datasets.range_file import RangeFile, ReadSpans
from feedline.stores.blobs import LocalBlob, RemoteBlob
from feedline.stores.coalescing import joined
from feedline.stores.protocol import Range
from feedline.stores.recent import Recent

_BLOCK_NBYTES = 256 << 10
_BLOCKS = 64


class _Here(threading.local):
    """What this thread holds."""

    held = ReadSpans()


class FarFile(RangeFile):
    """A blob. What is held is for the thread that holds it."""

    def __init__(self, blob: LocalBlob | RemoteBlob) -> None:
        super().__init__(blob.nbytes)
        self._blob = blob
        self._blocks: Recent[int, memoryview] = Recent(_BLOCKS)
        self._here = _Here()

    @contextmanager
    def holding(self, spans: Sequence[Range]) -> Iterator[None]:
        """Within the block, this thread finds these bytes in memory; they are read here, all at once."""
        ordered = sorted(set(spans))
        self._here.held = ReadSpans(ordered, self._blob.read(ordered))
        try:
            yield
        finally:
            self._here.held = ReadSpans()

    def _bytes(self, start: int, stop: int) -> memoryview:
        held = self._here.held.cut(start, stop)
        return self._from_blocks(start, stop) if held is None else held

    def _from_blocks(self, start: int, stop: int) -> memoryview:
        if stop - start > _BLOCK_NBYTES:
            return self._fetched([(start, stop)])[0]
        numbers = range(start // _BLOCK_NBYTES, (stop - 1) // _BLOCK_NBYTES + 1)
        kept = {number: block for number in numbers if (block := self._blocks.get(number)) is not None}
        missing = [number for number in numbers if number not in kept]
        ends = [(n * _BLOCK_NBYTES, min((n + 1) * _BLOCK_NBYTES, self._blob.nbytes)) for n in missing]
        for number, block in zip(missing, self._fetched(ends), strict=True):
            kept[number] = self._blocks.put(number, memoryview(bytes(block)))
        first = numbers[0] * _BLOCK_NBYTES
        return joined([kept[number] for number in numbers])[start - first : stop - first]

    def _fetched(self, spans: Sequence[Range]) -> list[memoryview]:
        with _nothing_collected():
            return self._blob.read(spans) if spans else []


@contextmanager
def _nothing_collected() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
