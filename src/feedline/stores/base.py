"""The store protocol, and the versions of files and objects."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar, runtime_checkable

from feedline.errors import ObjectChangedError, StateError
from feedline.stores.links import unsigned

_MTIME_TAG = "{:x}-{:x}"


class FileVersion(NamedTuple):
    """The state of a file or object, identified without reading it."""

    nbytes: int
    tag: str
    """A text that differs if the content differs; `unversioned(nbytes)` if only the size is known."""

    @classmethod
    def of(cls, status: os.stat_result, *, with_inode: bool = False) -> Self:
        """The version of a file.

        A copy with the same modification time has the same version. `with_inode` distinguishes the two: a file may be
        replaced by another one with the same size and time, such as two files of one archive.
        """
        tag = _MTIME_TAG.format(status.st_size, status.st_mtime_ns)
        return cls(status.st_size, f"{status.st_ino:x}-{tag}" if with_inode else tag)

    @classmethod
    def of_mtime(cls, nbytes: int, mtime_ns: int | None) -> Self:
        """The version of a file, from its size and modification time.

        Without a time, only the size is known.
        """
        return cls(nbytes, unversioned(nbytes) if mtime_ns is None else _MTIME_TAG.format(nbytes, mtime_ns))

    @property
    def is_known(self) -> bool:
        """True if another state of the same size would have another tag."""
        return self.tag != unversioned(self.nbytes)

    def matches(self, other: FileVersion) -> bool:
        """True if both are certainly the same state."""
        return self == other and self.is_known

    def check(self, now: FileVersion, name: str) -> None:
        """Raise StateError if the file has changed since a dataset was made.

        `now` is its current version, `name` its name in the message.
        """
        if now.tag != self.tag:
            raise changed_error(
                StateError, name, f"it had {self.nbytes} bytes, and has {now.nbytes} now or was written again"
            )


Error = TypeVar("Error", bound=Exception)


def changed_error(
    kind: type[Error],
    name: str,
    difference: str,
    *,
    since: str = "this dataset was made",
    remedy: str = "create the dataset again",
) -> Error:
    """The error for data whose version is not the earlier one."""
    return kind(f"{name} has changed since {since}: {difference}; {remedy}")


def check_version(asked: str | None, now: str, what: str) -> None:
    """Raise ObjectChangedError unless `now` is the requested version.

    `asked=None` accepts any version.
    """
    if asked is not None and asked != now:
        difference = f"version {asked} was requested or partly read, and it is {now} now; no part of it was used"
        raise changed_error(ObjectChangedError, what, difference, since="its version was looked up")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object of a store: path, size in bytes, and version.

    The version is a string that differs for different content.
    """

    path: str
    size: int
    version: str

    def __repr__(self) -> str:
        # The path of a link contains its signature.
        return f"ObjectInfo(path={unsigned(self.path)!r}, size={self.size!r}, version={self.version!r})"

    @property
    def state(self) -> FileVersion:
        """Size and version, without the path."""
        return FileVersion(self.size, self.version)

    @property
    def is_versioned(self) -> bool:
        """True if the version distinguishes contents of the same size."""
        return self.state.is_known


def unversioned(nbytes: int) -> str:
    """The version of an object of which only the size is known.

    A change of content with the same size cannot be detected.
    """
    return f"{nbytes} bytes"


Range = tuple[int, int]
"""`(start, stop)`, stop excluded: bytes of an object, or rows of an array."""


class ByteRange(NamedTuple):
    """The bytes of an object from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


Views = list[memoryview]
"""The contents of several ranges, in the order of the ranges."""


class Store(Protocol):
    """Objects by path, read in ranges.

    Safe to use from several threads; pickled by address; usable after a fork. Paths are relative to the store's
    address, with `/` between their parts. Data is read-only, and stays valid while it is referenced. Errors are
    `StoreError`s that name the object: missing, denied, changed, or unavailable after the retries of the store's
    policy.
    """

    @property
    def url(self) -> str:
        """The address of the store, always without credentials."""
        ...

    def info(self, path: str) -> ObjectInfo:
        """The current size and version of one object."""
        ...

    def size(self, path: str) -> int:
        """The size of one object in bytes."""
        ...

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        """Read the bytes from `start` up to `stop`, or to the end.

        RangeError for a range that reaches past the end. With `version`, ObjectChangedError if the object has another
        version.
        """
        ...

    def read_many(self, path: str, ranges: Sequence[Range], *, version: str | None = None) -> Views:
        """Read one view per `(start, stop)`, all of one version.

        Requests are sent concurrently.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List every object whose path begins with `prefix`, sorted by path.

        At any depth.
        """
        ...


@runtime_checkable
class FolderLister(Protocol):
    """A store that can list one folder without its subfolders."""

    def list_folder(self, folder: str = "") -> Sequence[ObjectInfo]:
        """List the objects directly in a folder, sorted by path.

        `folder` is "" or ends with a `/`.
        """
        ...


class VersionedObject(NamedTuple):
    """The content of an object, and its version."""

    data: memoryview
    version: str


@runtime_checkable
class VersionedReader(Protocol):
    """A store that reports the version of the data it has read."""

    def read_versioned(self, path: str) -> VersionedObject:
        """Read one object with its version, without an additional request."""
        ...
