"""The bytes of a tar while it is looked through: of a file, or of an object, from its beginning to its end."""

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
"""Parts of an object that are on their way while one is looked at."""


class TarSource(Protocol):
    """A tar that can be read within `with source:`, from front to back."""

    name: str
    """Its path or address."""

    @property
    def version(self) -> FileVersion:
        """Its state, as it is now."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size, as it was when it was opened."""
        ...

    def read(self, start: int, nbytes: int) -> bytes:
        """A copy of so many bytes, of fewer only at the end of the tar."""
        ...

    def view(self, start: int, nbytes: int) -> memoryview:
        """The same, not copied where that can be avoided."""
        ...

    def looks(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Small ranges from anywhere in the tar, each as far as it exists."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class FileSource:
    """A tar of this machine."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._file: FileIO
        self._nbytes = 0
        self._memory: memoryview | None = None

    @property
    def version(self) -> FileVersion:
        """The state of the file as it is now; FileNotFoundError names one that is not there."""
        return version_of(self.name)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read(self, start: int, nbytes: int) -> bytes:
        return os.pread(self._file.fileno(), nbytes, start)

    def view(self, start: int, nbytes: int) -> memoryview:
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ))
        return self._memory[start : start + nbytes]

    def looks(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read(start, stop - start) for start, stop in spans]

    def __enter__(self) -> Self:
        self._file = open(self.name, "rb", buffering=0)
        self._nbytes = os.fstat(self._file.fileno()).st_size
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._memory = None  # who still has a view of it keeps the mapping


class ObjectSource:
    """A tar in a store, read in parts, the next of which are fetched while one is looked at.

    What lies between two looks and fills whole parts is not fetched; what is behind is forgotten.
    """

    def __init__(self, blob: RemoteBlob) -> None:
        self.name = blob.name
        self._blob = blob
        self._coming: dict[int, Future[list[memoryview]]] = {}

    @property
    def version(self) -> FileVersion:
        """The state that was found; reading any other one is an ObjectChangedError."""
        return FileVersion(self._blob.nbytes, self._blob.version)

    @property
    def nbytes(self) -> int:
        return self._blob.nbytes

    def read(self, start: int, nbytes: int) -> bytes:
        return bytes(self.view(start, nbytes))

    def view(self, start: int, nbytes: int) -> memoryview:
        stop = min(start + nbytes, self.nbytes)
        if start >= stop:
            return memoryview(b"")
        first, last = start // _PART_NBYTES, (stop - 1) // _PART_NBYTES
        spans = [self._span(number) for number in range(first, last + 1)]
        return FetchedRanges(spans, self._parts(first, last)).cut(start, stop)

    def looks(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        within = [(max(0, min(start, self.nbytes)), max(0, min(stop, self.nbytes))) for start, stop in spans]
        return [bytes(view) for view in self._blob.read_uncached(within)]

    def _parts(self, first: int, last: int) -> list[memoryview]:
        for number in [number for number in self._coming if number < first]:
            self._coming.pop(number).cancel()
        for number in range(first, min(last + 1 + _AHEAD, -(-self.nbytes // _PART_NBYTES))):
            if number not in self._coming:
                self._coming[number] = self._pool.submit(self._blob.read, [self._span(number)])
        return [self._coming[number].result()[0] for number in range(first, last + 1)]

    def _span(self, number: int) -> tuple[int, int]:
        return number * _PART_NBYTES, min((number + 1) * _PART_NBYTES, self.nbytes)

    def __enter__(self) -> Self:
        self._pool = DaemonPool(1 + _AHEAD, "feedline-index")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        self._coming.clear()


def version_of(path: str) -> FileVersion:
    """The state of a file as it is now; FileNotFoundError names one that is not there."""
    return FileVersion.of(os.stat(path))  # noqa: PTH116 - asked of every shard of every batch
