"""File objects over byte ranges, for libraries that read files.

`SparseFile` fetches known ranges in advance. `FarFile` reads a file or object by cached blocks, and large reads from
ranges that a thread has loaded. `parts` and `Stream` read content sequentially in parts that fit into memory.

A library may hold a lock while it reads. h5py does, and takes the same lock when one of its objects is
garbage-collected. So garbage collection is disabled while a read waits for other threads.
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
    """A read-only file of `nbytes` bytes over `_bytes`.

    Reads return views. The position is not thread-safe.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._at = 0

    @abstractmethod
    def _bytes(self, start: int, stop: int) -> memoryview:
        """The bytes `[start, stop)`, a non-empty range."""

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
        """The next bytes, as a view."""
        start = self._at
        stop = max(start, self._nbytes if size < 0 else min(start + size, self._nbytes))
        data = self._bytes(start, stop) if start < stop else memoryview(b"")
        self._at = stop
        return data

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        try:
            data = self.read(len(buffer))
        except BaseException:
            del buffer  # the error's traceback must not keep the library's memory alive
            raise
        buffer[: len(data)] = data
        return len(data)


Read = Callable[[Sequence[Range]], list[memoryview]]


def merge_ranges(spans: Sequence[Range]) -> list[Range]:
    """Sort ranges and merge those that touch or overlap."""
    found: list[Range] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


class SparseFile(RangeFile):
    """A file whose `spans` are fetched at once, the rest on demand.

    `spans` are sorted and disjoint. A read within one span returns a view of it.
    """

    def __init__(self, nbytes: int, spans: Sequence[Range], read: Read) -> None:
        super().__init__(nbytes)
        self._ask, self._held = read, FetchedRanges(spans, read(spans))

    def _bytes(self, start: int, stop: int) -> memoryview:
        held = self._held.find(start, stop)
        return self._ask([(start, stop)])[0] if held is None else held

    def close(self) -> None:
        """Release the fetched bytes."""
        super().close()
        self._held = FetchedRanges()


def end_to_end(views: Sequence[memoryview]) -> SparseFile:
    """Concatenate views into one file; a read within one is not copied."""
    stops = list(accumulate(map(len, views)))
    spans = [(stop - len(view), stop) for stop, view in zip(stops, views, strict=True)]
    return SparseFile(stops[-1], spans, lambda _: list(views))


_BLOCK_NBYTES = 256 << 10


_BLOCKS = 64


class _ThreadSpans(threading.local):
    """Spans loaded by the current thread."""

    held = FetchedRanges()


class FarFile(RangeFile):
    """A file or object, read by cached blocks.

    Spans loaded with `holding` are visible only to the loading thread.
    """

    def __init__(self, blob: LocalFile | RemoteBlob) -> None:
        super().__init__(blob.nbytes)
        self._blob = blob
        self._blocks: LRUCache[int, memoryview] = LRUCache(_BLOCKS)
        self._here = _ThreadSpans()

    @contextmanager
    def holding(self, spans: Sequence[Range]) -> Iterator[None]:
        """Load these spans at once for this thread, for the block's duration."""
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
        with _gc_disabled():  # a collection could take the library's lock, which waits for this thread
            return self._blob.read(spans) if spans else []


@contextmanager
def _gc_disabled() -> Iterator[None]:
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
    """Yield the content in order; parts of an object are prefetched."""
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
    """Consumes bytes across the boundaries of parts."""

    def __init__(self, coming: Iterator[memoryview]) -> None:
        self._coming = coming
        self._part, self._at = memoryview(b""), 0

    def take(self, nbytes: int) -> memoryview:
        """The next bytes, which must exist; a view within one part."""
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
