"""A file object for libraries that read files, over bytes that are had in ranges."""

from __future__ import annotations

import io
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

from feedline.stores.protocol import Range


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


class ReadSpans:
    """What was read of some spans: `views[i]` of `spans[i]`, which are in order."""

    def __init__(self, spans: Sequence[Range] = (), views: Sequence[memoryview] = ()) -> None:
        self._starts, self._views = [start for start, _ in spans], views

    def cut(self, start: int, stop: int) -> memoryview | None:
        """The bytes from `start` up to `stop`, if they lie in one of the spans."""
        number = bisect_right(self._starts, start) - 1
        if number < 0:
            return None
        first, view = self._starts[number], self._views[number]
        return view[start - first : stop - first] if stop <= first + len(view) else None
