"""Tars that a command is given, on this machine or in stores, and their indexes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from feedline.datasets.paths import find
from feedline.errors import ArgumentError
from feedline.packing import measured, tars_of
from feedline.shards import Head, Index, arrays, build_index, far_indexes, glance, open_index, write_index
from feedline.shards.reading import ObjectSource
from feedline.shards.sidecar import head_at, places, whole
from feedline.stores.blobs import RemoteBlob
from feedline.stores.whereabouts import made


class Tar(Protocol):
    """One tar, and its index on this machine."""

    name: str
    """Its path or address."""
    place: str
    """Where its index is kept."""

    def head(self) -> Head | None:
        """What the index that is there tells; None if there is none that fits."""
        ...

    def make(self, *, checksum: bool) -> Index:
        """Make the index anew, grids included, and write it to its place."""
        ...

    def index(self) -> Index | None:
        """The index that is there; None if there is none."""
        ...

    def built(self) -> Index:
        """The index, made anew in memory."""
        ...

    def verify(self, index: Index) -> None:
        """ShardError if the tar has not the checksum that its index tells."""
        ...


class Near:
    """A file, whose index lies beside it, or in the folder."""

    def __init__(self, path: str, folder: Path | None, *, allow_truncated: bool) -> None:
        self.name = path
        self.place = places(str(Path(path).absolute()), folder)[0]
        self._folder = folder
        self._allow_truncated = allow_truncated

    def head(self) -> Head | None:
        """What the index that is there tells; None if there is none that fits."""
        path = str(Path(self.name).absolute())
        return glance(path, folder=self._folder, allow_truncated=self._allow_truncated)

    def make(self, *, checksum: bool) -> Index:
        """Make the index anew, grids included, and write it to its place."""
        made(Path(self.place).parent, "the folder of the index")
        write_index(self.name, self.place, measure=measured, checksum=checksum, allow_truncated=self._allow_truncated)
        return open_index(self.name, self.place, allow_truncated=self._allow_truncated)

    def index(self) -> Index | None:
        """The index that is there; None if there is none, ShardError if it does not fit."""
        if not Path(self.place).is_file():
            return None
        return open_index(self.name, self.place, allow_truncated=self._allow_truncated)

    def built(self) -> Index:
        """The index, made anew in memory."""
        return build_index(self.name, allow_truncated=self._allow_truncated)

    def verify(self, index: Index) -> None:
        """ShardError if the tar has not the checksum that its index tells."""
        index.verify()


class Far:
    """An object, whose index lies in the folder, else where datasets look for it on this machine, or beside it."""

    def __init__(self, blob: RemoteBlob, folder: Path | None, *, allow_truncated: bool) -> None:
        self.name = blob.name
        self.place = places(blob.name, folder)[0]
        self.blob = blob
        self._allow_truncated = allow_truncated

    def head(self) -> Head | None:
        """What the index that is there tells, which is kept at its place; None if there is none that fits."""
        head = head_at(self.place, ObjectSource(self.blob).version)
        if head is None:
            index = far_indexes.looked_up(self.blob, self.place)
            head = None if index is None else self._written(index).head
        return head if head is None or head.cut is None or self._allow_truncated else None

    def make(self, *, checksum: bool) -> Index:
        """Make the index anew, grids included, and write it to its place."""
        index = far_indexes.made(self.blob, measure=measured, checksum=checksum, allow_truncated=self._allow_truncated)
        return self._written(index)

    def index(self) -> Index | None:
        """The index that is there; None if there is none that fits."""
        index = far_indexes.looked_up(self.blob, self.place)
        return None if index is None else whole(index, self._allow_truncated)

    def built(self) -> Index:
        """The index, made anew in memory."""
        return far_indexes.made(self.blob, allow_truncated=self._allow_truncated)

    def verify(self, index: Index) -> None:
        """ShardError if the object has not the checksum that its index tells."""
        index.verify(ObjectSource(self.blob))

    def _written(self, index: Index) -> Index:
        made(Path(self.place).parent, "the folder of the index")
        arrays.write(self.place, index.written(ObjectSource(self.blob).version))
        return index


def tars_at(sources: Sequence[str], folder: Path | None = None, *, allow_truncated: bool = False) -> list[Tar]:
    """The tars that paths, addresses and patterns mean; ArgumentError if there are none. Indexes lie in `folder`."""
    if not is_far(sources):
        return [Near(path, folder, allow_truncated=allow_truncated) for path in _files(sources)]
    blobs = find(sources, "*.tar")
    return [
        Far(blob, folder, allow_truncated=allow_truncated)
        if isinstance(blob, RemoteBlob)
        else Near(blob.name, folder, allow_truncated=allow_truncated)
        for blob in blobs
    ]


def is_far(sources: Sequence[str]) -> bool:
    """Whether there are addresses among the sources."""
    return any("://" in source for source in sources)


def _files(sources: Sequence[str]) -> list[str]:
    tars = tars_of(sources)
    if not tars:
        raise ArgumentError(f"{', '.join(sources)} hold no .tar files")
    return tars
