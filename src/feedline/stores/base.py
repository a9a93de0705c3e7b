"""What every store can do, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, runtime_checkable

from feedline.errors import ObjectChangedError, StateError


class FileVersion(NamedTuple):
    """The state of a file or object, as far as it shows without reading it."""

    nbytes: int
    tag: str
    """A text that differs when the content does; `unversioned(nbytes)` if only the size is known."""

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """The version of a file: the same for a copy that keeps the time of the last change."""
        return cls(status.st_size, f"{status.st_size:x}-{status.st_mtime_ns:x}")

    @property
    def is_known(self) -> bool:
        """Whether another state of the same size would show."""
        return self.tag != unversioned(self.nbytes)

    def matches(self, other: FileVersion) -> bool:
        """Whether both are surely the same state."""
        return self == other and self.is_known

    def check(self, now: FileVersion, name: str) -> None:
        """Raise StateError if the file is `now` another one than a dataset was made from."""
        if now.tag != self.tag:
            raise StateError(
                f"{name} has changed since this dataset was made: it had {self.nbytes} bytes, and has {now.nbytes} now "
                "or was written again; create the dataset again"
            )


def check_version(asked: str | None, now: str, what: str) -> None:
    """Raise ObjectChangedError if an object has another version than the one that was asked for, if any was."""
    if asked is not None and asked != now:
        raise ObjectChangedError(
            f"{what} changed: version {asked} was asked for or read in part, and it is {now} now. Nothing of the new "
            "one was used; create the dataset again to read it"
        )


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object of a store: its path there, its bytes, and a text that differs when its content does."""

    path: str
    size: int
    version: str

    @property
    def state(self) -> FileVersion:
        """Size and version."""
        return FileVersion(self.size, self.version)

    @property
    def is_versioned(self) -> bool:
        """Whether the store tells one state of the object from another of the same size."""
        return self.state.is_known


def unversioned(nbytes: int) -> str:
    """The version of an object of which the store tells nothing but its size: it may change without a sign."""
    return f"{nbytes} bytes"


Range = tuple[int, int]
"""From the first number up to, not including, the second: bytes of an object, or rows of an array."""


class ByteRange(NamedTuple):
    """The bytes of an object from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


Views = list[memoryview]
"""What several ranges hold, in their order."""


class Store(Protocol):
    """Objects by path, read in ranges. Safe to use from several threads; pickled by address; usable after a fork.

    Paths are relative to the store's address, with `/` between their parts. What is read is read-only, and stays
    valid for as long as it is held. Errors are `StoreError`s that name the object: missing, denied, changed, or
    unavailable after the retries of the store's policy.
    """

    @property
    def url(self) -> str:
        """The address of the store; it never holds credentials."""
        ...

    def info(self, path: str) -> ObjectInfo:
        """Size and version of one object, as they are now."""
        ...

    def size(self, path: str) -> int:
        """The bytes of one object."""
        ...

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        """The bytes from `start` up to `stop`, or to the end; a range that reaches past the end is an error.

        With `version`, any other version of the object is an ObjectChangedError.
        """
        ...

    def read_many(self, path: str, ranges: Sequence[Range], *, version: str | None = None) -> Views:
        """One view for each `(start, stop)`, all of the same version of the object; many requests at once."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose path begins with `prefix`, at any depth, in the order of their paths."""
        ...


@runtime_checkable
class FolderLister(Protocol):
    """A store that can list one folder without those within it."""

    def list_folder(self, folder: str = "") -> Sequence[ObjectInfo]:
        """The objects right in a folder, "" or one that ends with a `/`, in the order of their paths."""
        ...
