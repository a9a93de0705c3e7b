"""Sequential access to the bytes of a tar while it is indexed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future
from io import FileIO
from types import TracebackType
from typing import Protocol, Self

from feedline.core.threads import DaemonPool
from feedline.stores.base import FileVersion
from feedline.stores.files import RemoteBlob
from feedline.stores.requests import FetchedRanges

_PART_NBYTES = 4 << 20


_AHEAD = 4
"""Parts of an object that are fetched ahead."""


class TarSource(Protocol):
    """A tar, read sequentially within `with source:`."""

    name: str
    """Path or address."""

    @property
    def version(self) -> FileVersion:
        """The current state."""
        ...

    @property
    def nbytes(self) -> int:
        """The size when it was opened."""
        ...

    def read(self, start: int, nbytes: int) -> bytes:
        """Copy `nbytes` bytes; fewer only at the end of the tar."""
        ...

    def view(self, start: int, nbytes: int) -> memoryview:
        """The bytes as `read`, without a copy if possible."""
        ...

    def read_spans(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Copy small ranges from anywhere, clipped to the tar."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class FileSource:
    """A tar file."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._file: FileIO
        self._nbytes = 0
        self._memory: memoryview | None = None

    @property
    def version(self) -> FileVersion:
        """The current state of the file; FileNotFoundError if it is gone."""
        return version_of(self.name)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read(self, start: int, nbytes: int) -> bytes:
        return os.pread(self._file.fileno(), nbytes, start)

    def view(self, start: int, nbytes: int) -> memoryview:
        # Mapped on the first view only: a walk over headers reads a few bytes of each member.
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ))
        return self._memory[start : start + nbytes]

    def read_spans(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read(start, stop - start) for start, stop in spans]

    def __enter__(self) -> Self:
        self._file = open(self.name, "rb", buffering=0)
        self._nbytes = os.fstat(self._file.fileno()).st_size
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._memory = None  # remaining views keep the mapping alive


class ObjectSource:
    """A tar in a store, read in parts that are fetched ahead.

    Whole parts between two reads are not fetched; parts before the current read are released.
    """

    def __init__(self, blob: RemoteBlob) -> None:
        self.name = blob.name
        self.blob = blob
        self._pending: dict[int, Future[list[memoryview]]] = {}

    @property
    def version(self) -> FileVersion:
        """The version to read; reading another one raises ObjectChangedError."""
        return FileVersion(self.blob.nbytes, self.blob.version)

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes

    def read(self, start: int, nbytes: int) -> bytes:
        return bytes(self.view(start, nbytes))

    def view(self, start: int, nbytes: int) -> memoryview:
        stop = min(start + nbytes, self.nbytes)
        if start >= stop:
            return memoryview(b"")
        first, last = start // _PART_NBYTES, (stop - 1) // _PART_NBYTES
        spans = [self._span(number) for number in range(first, last + 1)]
        return FetchedRanges(spans, self._parts(first, last)).cut(start, stop)

    def read_spans(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        within = [(max(0, min(start, self.nbytes)), max(0, min(stop, self.nbytes))) for start, stop in spans]
        return [bytes(view) for view in self.blob.read_uncached(within)]

    def _parts(self, first: int, last: int) -> list[memoryview]:
        # The walk only goes forward, so earlier parts would be memory for nothing.
        for number in [number for number in self._pending if number < first]:
            self._pending.pop(number).cancel()
        for number in range(first, min(last + 1 + _AHEAD, -(-self.nbytes // _PART_NBYTES))):
            if number not in self._pending:
                self._pending[number] = self._pool.submit(self.blob.read, [self._span(number)])
        return [self._pending[number].result()[0] for number in range(first, last + 1)]

    def _span(self, number: int) -> tuple[int, int]:
        return number * _PART_NBYTES, min((number + 1) * _PART_NBYTES, self.nbytes)

    def __enter__(self) -> Self:
        self._pool = DaemonPool(1 + _AHEAD, "feedline-index")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error, the parts that are under way are not waited for.
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        self._pending.clear()


def version_of(path: str) -> FileVersion:
    """The current state of a file; FileNotFoundError if it is gone."""
    return FileVersion.of(os.stat(path))  # noqa: PTH116 - called for every shard of every batch
