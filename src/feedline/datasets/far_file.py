"""A blob as the file that a library reads: by blocks where it looks around, from what was fetched where it reads data.

The library may hold a lock while it reads. h5py does, and takes it for every object of its own that is collected: so
nothing may be collected while a read waits for other threads.
"""

from __future__ import annotations

import gc
import io
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from feedline.stores.blobs import LocalBlob, RemoteBlob
from feedline.stores.coalescing import joined
from feedline.stores.recent import Recent

_BLOCK_NBYTES = 256 << 10
_BLOCKS = 64

Span = tuple[int, int]


class FarFile(io.RawIOBase):
    """A read-only file object. Its position is for one thread at a time; what is held is for the thread that holds."""

    def __init__(self, blob: LocalBlob | RemoteBlob) -> None:
        super().__init__()
        self._blob = blob
        self._at = 0
        self._blocks: Recent[int, memoryview] = Recent(_BLOCKS)
        self._held = threading.local()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._blob.nbytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        start, stop = self._at, max(self._at, min(self._at + len(buffer), self._blob.nbytes))
        try:
            data = self._from_held(start, stop) or self._from_blocks(start, stop)
        except BaseException:
            del buffer  # memory of the library's, which whoever keeps the error must not keep as well
            raise
        buffer[: stop - start] = data
        self._at = stop
        return stop - start

    @contextmanager
    def holding(self, spans: Sequence[Span]) -> Iterator[None]:
        """Within the block, this thread finds these bytes in memory; they are read here, all at once."""
        ordered = sorted(set(spans))
        self._held.spans, self._held.views = ordered, self._blob.read(ordered)
        try:
            yield
        finally:
            self._held.spans, self._held.views = [], []

    def _from_held(self, start: int, stop: int) -> memoryview | None:
        spans: list[Span] = getattr(self._held, "spans", [])
        at = bisect_right(spans, (start, self._blob.nbytes)) - 1
        if at < 0 or spans[at][1] < stop:
            return None
        view: memoryview = self._held.views[at]
        return view[start - spans[at][0] : stop - spans[at][0]]

    def _from_blocks(self, start: int, stop: int) -> memoryview:
        if start == stop:
            return memoryview(b"")
        if stop - start > _BLOCK_NBYTES:
            return self._read([(start, stop)])[0]
        numbers = range(start // _BLOCK_NBYTES, (stop - 1) // _BLOCK_NBYTES + 1)
        kept = {number: block for number in numbers if (block := self._blocks.get(number)) is not None}
        missing = [number for number in numbers if number not in kept]
        ends = [(n * _BLOCK_NBYTES, min((n + 1) * _BLOCK_NBYTES, self._blob.nbytes)) for n in missing]
        for number, block in zip(missing, self._read(ends), strict=True):
            kept[number] = self._blocks.put(number, memoryview(bytes(block)))
        first = numbers[0] * _BLOCK_NBYTES
        return joined([kept[number] for number in numbers])[start - first : stop - first]

    def _read(self, spans: Sequence[Span]) -> list[memoryview]:
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
