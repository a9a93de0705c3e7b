"""A file object for libraries that read files, over bytes that are had in ranges.

A file for libraries that read files, of which the parts that they will ask for were read before.

A blob as the file that a library reads: by blocks where it looks around, from what was fetched where it reads data.

The library may hold a lock while it reads. h5py does, and takes it for every object of its own that is collected: so
nothing may be collected while a read waits for other threads.

Files and objects from their beginning to their end, in parts that fit into memory.
"""

from __future__ import annotations

import gc
import io
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import accumulate

from feedline.core.caches import LRUCache
from feedline.core.threads import DaemonPool
from feedline.stores.base import Range
from feedline.stores.files import Blob, LocalFile, RemoteBlob
from feedline.stores.requests import FetchedRanges, join_views


class RangeFile(io.RawIOBase):
    """`nbytes` bytes, read-only; what is read lies where `_bytes` has it. Its position is for one thread at a time."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._at = 0

    @abstractmethod
    def _bytes(self, start: int, stop: int) -> memoryview:
        """Those from `start` up to `stop`, which are some."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> memoryview:
        """The next bytes; a view."""
        start = self._at
        stop = max(start, self._nbytes if size < 0 else min(start + size, self._nbytes))
        data = self._bytes(start, stop) if start < stop else memoryview(b"")
        self._at = stop
        return data

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        try:
            data = self.read(len(buffer))
        except BaseException:
            del buffer  # memory of the library's, which whoever keeps the error must not keep as well
            raise
        buffer[: len(data)] = data
        return len(data)


Read = Callable[[Sequence[Range]], list[memoryview]]


def merge_ranges(spans: Sequence[Range]) -> list[Range]:
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
        self._ask, self._held = read, FetchedRanges(spans, read(spans))

    def _bytes(self, start: int, stop: int) -> memoryview:
        held = self._held.find(start, stop)
        return self._ask([(start, stop)])[0] if held is None else held

    def close(self) -> None:
        """Let go of what was read."""
        super().close()
        self._held = FetchedRanges()


def end_to_end(views: Sequence[memoryview]) -> SparseFile:
    """A file that holds these one after the other; a part of one is read without a copy."""
    stops = list(accumulate(map(len, views)))
    spans = [(stop - len(view), stop) for stop, view in zip(stops, views, strict=True)]
    return SparseFile(stops[-1], spans, lambda _: list(views))


_BLOCK_NBYTES = 256 << 10


_BLOCKS = 64


class _ThreadSpans(threading.local):
    """What this thread holds."""

    held = FetchedRanges()


class FarFile(RangeFile):
    """A blob. What is held is for the thread that holds it."""

    def __init__(self, blob: LocalFile | RemoteBlob) -> None:
        super().__init__(blob.nbytes)
        self._blob = blob
        self._blocks: LRUCache[int, memoryview] = LRUCache(_BLOCKS)
        self._here = _ThreadSpans()

    @contextmanager
    def holding(self, spans: Sequence[Range]) -> Iterator[None]:
        """Within the block, this thread finds these bytes in memory; they are read here, all at once."""
        ordered = sorted(set(spans))
        self._here.held = FetchedRanges(ordered, self._blob.read(ordered))
        try:
            yield
        finally:
            self._here.held = FetchedRanges()

    def _bytes(self, start: int, stop: int) -> memoryview:
        held = self._here.held.find(start, stop)
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
        return join_views([kept[number] for number in numbers])[start - first : stop - first]

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


_PART_NBYTES = 8 << 20


_AHEAD = 4


def parts(blob: Blob) -> Iterator[memoryview]:
    """The content in order; of an object, the next parts are on their way while one is worked on."""
    spans = [(at, min(at + _PART_NBYTES, blob.nbytes)) for at in range(0, blob.nbytes, _PART_NBYTES)]
    if isinstance(blob, LocalFile):
        yield from blob.read(spans)
        return
    coming: deque[Future[list[memoryview]]] = deque()
    with DaemonPool(_AHEAD, "feedline-stream") as pool:
        for span in spans:
            if len(coming) == _AHEAD:
                yield coming.popleft().result()[0]
            coming.append(pool.submit(blob.read, [span]))
        while coming:
            yield coming.popleft().result()[0]


class Stream:
    """Bytes that are taken one after the other, however they come."""

    def __init__(self, coming: Iterator[memoryview]) -> None:
        self._coming = coming
        self._part, self._at = memoryview(b""), 0

    def take(self, nbytes: int) -> memoryview:
        """The next bytes, which must be there: a view where they lie in one part."""
        stop = self._at + nbytes
        if stop <= len(self._part):
            taken = self._part[self._at : stop]
            self._at = stop
            return taken
        pieces = [self._part[self._at :]]
        missing = stop - len(self._part)
        while missing:
            self._part = next(self._coming)
            self._at = min(missing, len(self._part))
            pieces.append(self._part[: self._at])
            missing -= self._at
        return join_views(pieces)
