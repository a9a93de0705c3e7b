"""File objects over byte ranges, for libraries that read files.

`SparseFile` fetches known ranges in advance. `BlockFile` reads a file or object by cached blocks, and large reads from
ranges that a thread has loaded. `ForwardReader`, `parts` and `Stream` read content from front to back, in parts that
fit into memory.

A library may hold a lock while it reads. h5py does, and takes the same lock when one of its objects is
garbage-collected. So garbage collection is disabled while a read waits for other threads.
"""

from __future__ import annotations

import io
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from feedline.core.caches import LRUCache
from feedline.core.finalizers import no_collections
from feedline.core.threads import DaemonPool
from feedline.errors import SampleError
from feedline.stores.base import Range, Views
from feedline.stores.files import File
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
            del buffer  # the error's traceback must not keep the library's memory
            raise
        buffer[: len(data)] = data
        return len(data)


ReadRanges = Callable[[Sequence[Range]], list[memoryview]]


def merge_ranges(spans: Sequence[Range]) -> list[Range]:
    """Sort ranges and merge adjacent or overlapping ones."""
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

    def __init__(self, nbytes: int, spans: Sequence[Range], read: ReadRanges) -> None:
        super().__init__(nbytes)
        self._ask, self._held = read, FetchedRanges(spans, read(spans))

    def _bytes(self, start: int, stop: int) -> memoryview:
        held = self._held.find(start, stop)
        return self._ask([(start, stop)])[0] if held is None else held

    def close(self) -> None:
        """Release the fetched bytes."""
        super().close()
        self._held = FetchedRanges()


_BLOCK_NBYTES = 256 << 10


_BLOCKS = 64


class _ThreadSpans(threading.local):
    """Spans loaded by the current thread."""

    held = FetchedRanges()


class RangeSource(Protocol):
    """Bytes read by ranges: a file, an object, or a part."""

    nbytes: int

    def read(self, spans: Sequence[Range]) -> Views: ...


class BlockFile(RangeFile):
    """A file or object, read by cached blocks.

    Spans loaded with `holding` are visible only to the loading thread.
    """

    def __init__(self, file: RangeSource) -> None:
        super().__init__(file.nbytes)
        self._file = file
        self._blocks: LRUCache[int, memoryview] = LRUCache(_BLOCKS)
        self._here = _ThreadSpans()

    @property
    def nbytes(self) -> int:
        """Bytes of the file or object."""
        return self._nbytes

    @contextmanager
    def holding(self, spans: Sequence[Range]) -> Iterator[None]:
        """Load these spans at once for this thread, for the block's duration."""
        ordered = sorted(set(spans))
        self._here.held = FetchedRanges(ordered, self._file.read(ordered))
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
        ends = [(n * _BLOCK_NBYTES, min((n + 1) * _BLOCK_NBYTES, self._file.nbytes)) for n in missing]
        for number, block in zip(missing, self._fetched(ends), strict=True):
            kept[number] = self._blocks.put(number, memoryview(bytes(block)))
        first = numbers[0] * _BLOCK_NBYTES
        return join_views([kept[number] for number in numbers])[start - first : stop - first]

    def _fetched(self, spans: Sequence[Range]) -> list[memoryview]:
        with no_collections():  # a collection could wait for the library's lock, and its holder for this thread
            return self._file.read(spans) if spans else []


_PART_NBYTES = 8 << 20


_AHEAD = 4
"""Number of parts of an object that are prefetched."""


class ForwardReader:
    """A file or object, read mostly from front to back.

    For use in a `with` block. Parts of an object are prefetched. Whole parts between two reads are not fetched, and
    parts before the current read are released. Ranges are clipped to the content.
    """

    def __init__(self, file: File, part_nbytes: int = _PART_NBYTES) -> None:
        self._file, self._part_nbytes = file, part_nbytes
        self._pending: dict[int, Future[list[memoryview]]] = {}
        self._opened: io.FileIO | None = None

    def copy(self, start: int, stop: int) -> bytes:
        """Copy a few bytes."""
        # Through a mapping, each byte range would cost a page fault and, on a cold disk, the kernel's read-ahead.
        return (
            bytes(self.view(start, stop))
            if self._opened is None
            else os.pread(self._opened.fileno(), stop - start, start)
        )

    def view(self, start: int, stop: int) -> memoryview:
        """The bytes of a range, without a copy if possible."""
        data = self._file.data
        if data is not None:
            self._file.check_unchanged()
            return data[start:stop]
        start, stop = self._clipped(start, stop)
        if start == stop:
            return memoryview(b"")
        first, last = start // self._part_nbytes, (stop - 1) // self._part_nbytes
        spans = [self._span(number) for number in range(first, last + 1)]
        return FetchedRanges(spans, self._parts(first, last)).cut(start, stop)

    def copies(self, spans: Sequence[Range]) -> list[bytes]:
        """Copy small ranges from anywhere."""
        if self._opened is not None:
            return [self.copy(start, stop) for start, stop in spans]
        return [bytes(view) for view in self._file.read_uncached([self._clipped(*span) for span in spans])]

    def _clipped(self, start: int, stop: int) -> Range:
        nbytes = self._file.nbytes
        return min(start, nbytes), min(max(start, stop), nbytes)

    def _parts(self, first: int, last: int) -> list[memoryview]:
        for number in [number for number in self._pending if number < first]:
            self._pending.pop(number).cancel()
        for number in range(first, min(last + 1 + _AHEAD, -(-self._file.nbytes // self._part_nbytes))):
            if number not in self._pending:
                self._pending[number] = self._pool.submit(self._file.read, [self._span(number)])
        return [self._pending[number].result()[0] for number in range(first, last + 1)]

    def _span(self, number: int) -> Range:
        return number * self._part_nbytes, min((number + 1) * self._part_nbytes, self._file.nbytes)

    def __enter__(self) -> Self:
        if self._file.local_path is not None:
            self._opened = open(self._file.local_path, "rb", buffering=0)
        self._pool = DaemonPool(1 + _AHEAD, "feedline-forward").__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        self._pool.__exit__(kind, error, trace)
        if self._opened is not None:
            self._opened.close()


def parts(file: File) -> Iterator[memoryview]:
    """Yield the content in order; parts of an object are prefetched."""
    with ForwardReader(file) as reader:
        for start in range(0, file.nbytes, _PART_NBYTES):
            yield reader.view(start, start + _PART_NBYTES)


class Stream:
    """The content of a file or object, taken from front to back.

    Parts of an object are prefetched. `at` is the position of the next byte.
    """

    def __init__(self, file: File) -> None:
        self.at = 0
        self._file, self._coming = file, parts(file)
        self._part, self._next = memoryview(b""), 0

    def take(self, nbytes: int) -> memoryview:
        """The next bytes; SampleError if fewer are left."""
        left = self._file.nbytes - self.at
        if not 0 <= nbytes <= left:
            raise SampleError(
                f"{self._file.name} claims {nbytes} bytes at byte {self.at}, but {left} are left; was the file copied"
                " completely?"
            )
        self.at += nbytes
        stop = self._next + nbytes
        if stop <= len(self._part):
            taken = self._part[self._next : stop]
            self._next = stop
            return taken
        pieces = [self._part[self._next :]]
        missing = stop - len(self._part)
        while missing:
            self._part = next(self._coming)
            self._next = min(missing, len(self._part))
            pieces.append(self._part[: self._next])
            missing -= self._next
        return join_views(pieces)
