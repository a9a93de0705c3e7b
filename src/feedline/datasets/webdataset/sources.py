"""Sequential access to the bytes of a tar while it is indexed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from feedline.core.paths import Pathlike
from feedline.datasets.file_objects import ForwardReader
from feedline.stores.base import FileVersion
from feedline.stores.files import File, FileSet, local_info

_PART_NBYTES = 4 << 20


class TarSource:
    """A tar of a file set, read from front to back.

    To be used as `with source:`. Ranges are clipped to the tar.
    """

    def __init__(self, files: FileSet, number: int) -> None:
        self.name = files.name(number)
        """Path or address."""
        self.version: FileVersion = files.info(number).state
        """The state to read; another one is an error."""
        self._files, self._number = files, number

    @classmethod
    def at(cls, path: Pathlike) -> Self:
        """The tar file at a path, in its current version."""
        return cls(FileSet([(None, local_info(os.path.abspath(path)))]), 0)  # noqa: PTH100 - links stay

    @property
    def nbytes(self) -> int:
        """The size of the tar."""
        return self.version.nbytes

    @property
    def file(self) -> File:
        """The opened tar; StateError if a file has changed."""
        return self._files.open(self._number)

    def read(self, start: int, nbytes: int) -> bytes:
        """Copy a few bytes; fewer only at the end of the tar."""
        return self._reader.copy(start, start + nbytes)

    def view(self, start: int, nbytes: int) -> memoryview:
        """The same bytes as `read`, without a copy if possible."""
        return self._reader.view(start, start + nbytes)

    def read_spans(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Copy small ranges from anywhere."""
        return self._reader.copies(spans)

    def check_unchanged(self) -> None:
        """Raise StateError if a file has changed since it was opened."""
        self._opened.check_unchanged(at_once=True)

    def __enter__(self) -> Self:
        self._opened = self.file
        self._reader = ForwardReader(self._opened, _PART_NBYTES).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)
        del self._opened, self._reader
