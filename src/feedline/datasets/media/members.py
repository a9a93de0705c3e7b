"""Media files that are members of tar shards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import NamedTuple

from feedline.core.paths import Pathlike
from feedline.datasets.file_objects import BlockFile
from feedline.datasets.webdataset.shards import Tars
from feedline.datasets.webdataset.tar import CLASSES
from feedline.errors import SampleError
from feedline.stores import AccessDeniedError, ObjectInfo, ObjectNotFoundError
from feedline.stores.base import Range, Views
from feedline.stores.cache import CachedStore, ObjectRange, without_cache
from feedline.stores.files import Extent, FileSet

TAR_ENDINGS = (".tar", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz", ".tgz", ".tzst", ".tbz2", ".txz")
"""Endings of the names of tar shards, in lower case."""


class _Member(NamedTuple):
    """A member; `key` and the extent `label` of "cls" are its sample's."""

    name: str
    extent: Extent
    key: str
    label: Extent | None


class TarMembers:
    """Members with media extensions, numbered as `FileSet` numbers files.

    A name consists of the name of the tar and the name of the member. `labels` are the numbers of the members' classes,
    which `classes` names if a `classes.json` of `feedline pack` is next to the tars; otherwise those in the members
    "cls", or None.
    """

    def __init__(self, tars: FileSet, extensions: tuple[str, ...], index_dir: Pathlike | None) -> None:
        self._tars = tars
        self._members = _members(tars, extensions, index_dir)
        if not self._members:
            raise FileNotFoundError(f"no members of {', '.join(tars.names)} end with {', '.join(extensions)}")
        self.classes, self.labels = self._read_labels()

    def __len__(self) -> int:
        return len(self._members)

    @property
    def is_local(self) -> bool:
        """True if all tars are files of this machine."""
        return self._tars.is_local

    def name(self, number: int) -> str:
        """The path or address of the tar, and the member's name."""
        return self._members[number].name

    @property
    def names(self) -> list[str]:
        """The names of all members."""
        return [each.name for each in self._members]

    def info(self, number: int) -> ObjectInfo:
        """Size, and a version that differs if the tar differs."""
        name, (tar, start, stop), *_ = self._members[number]
        info = self._tars.info(tar)
        # A version that consists only of the size of the tar does not identify the member.
        version = f"{info.version}-{start:x}" if info.is_versioned else f"{stop - start}"
        return ObjectInfo(name, stop - start, version)

    def ranges(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, ObjectRange]]:
        """The object ranges that a prefetch of these parts must fetch."""
        places = [(self._members[number].extent, start, stop) for number, start, stop in extents]
        return self._tars.ranges([Extent(at.file, at.start + start, at.start + stop) for at, start, stop in places])

    def source(self, number: int) -> BlockFile:
        """A member for a decoder; StateError if its tar has changed."""
        name, extent, *_ = self._members[number]
        return BlockFile(_FilePart(self._tars, extent, name))

    def _read_labels(self) -> tuple[list[str], list[int | None]]:
        classes = _classes_beside(self._tars)
        numbers = {name: number for number, name in enumerate(classes)}
        named = [numbers.get(each.key.partition("/")[0]) for each in self._members]
        if classes and None not in named:
            return classes, named
        with_label = [(number, each.label) for number, each in enumerate(self._members) if each.label is not None]
        contents = self._tars.read([extent for _, extent in with_label])
        labels: list[int | None] = [None] * len(self._members)
        for (number, _), content in zip(with_label, contents, strict=True):
            labels[number] = self._parse_label(number, bytes(content))
        return [], labels

    def _parse_label(self, number: int, content: bytes) -> int:
        try:
            return int(content)
        except ValueError:
            place = self._members[number].name.removesuffix(PurePosixPath(self._members[number].name).name)
            key = PurePosixPath(self._members[number].key).name
            raise SampleError(
                f"{place}{key}.cls is not a number: {content[:40]!r}; write the index of the class"
            ) from None


class _FilePart:
    """A part of a file or object, as a separate file."""

    def __init__(self, files: FileSet, extent: Extent, name: str) -> None:
        self._files, self._extent = files, extent
        self.name, self.nbytes = name, extent.stop - extent.start
        self.version = files.info(extent.file).version
        files[extent.file].check_unchanged(at_once=True)

    def read(self, spans: Sequence[Range]) -> Views:
        """One view per `(start, stop)` of the part."""
        return self._files[self._extent.file].read(self._moved(spans))

    def read_uncached(self, spans: Sequence[Range]) -> Views:
        """Views as from `read`, without any cache."""
        return self._files[self._extent.file].read_uncached(self._moved(spans))

    def _moved(self, spans: Sequence[Range]) -> list[Range]:
        return [(self._extent.start + start, self._extent.start + stop) for start, stop in spans]


def _members(tars: FileSet, extensions: tuple[str, ...], index_dir: Pathlike | None) -> list[_Member]:
    """List the members with these extensions.

    They keep the order of tars and samples; members of one sample are sorted by name.
    """
    opened = Tars(tars, index_dir=index_dir)
    opened.heads()  # builds missing indexes, several at once
    members = []
    for tar in range(len(tars)):
        index = opened.index(tar)
        wanted = sorted(field for field in index.fields if f".{field}".lower().endswith(extensions))
        columns = [(column, field) for field in [*wanted, "cls"] if (column := index.column(field)) is not None]
        for row in range(len(index)):
            extents = {
                field: Extent(tar, start, start + int(index.sizes[row, column]))
                for column, field in columns
                if (start := index.start(row, column))
            }
            key, label = index.key(row), extents.get("cls")
            members += [
                _Member(f"{tars.name(tar)}/{key}.{field}", extents[field], key, label)
                for field in wanted
                if field in extents
            ]
    return members


def _classes_beside(tars: FileSet) -> list[str]:
    """The class names of `classes.json` next to the tars.

    None unless the files next to all tars are equal.
    """
    folders = {(tars.name(number).rpartition("/")[0], number) for number in range(len(tars))}
    numbers: Mapping[str, int] = dict(sorted(folders, reverse=True))
    texts = {_text_beside(tars, number) for number in numbers.values()}
    text = texts.pop()
    return [] if texts or text is None else list(map(str, json.loads(text)))


def _text_beside(tars: FileSet, number: int) -> bytes | None:
    place = PurePosixPath(tars.info(number).path).with_name(CLASSES)
    store = tars.store(number)
    with suppress(FileNotFoundError, ObjectNotFoundError, AccessDeniedError):
        if store is not None:
            return bytes(without_cache(store).read(str(place)))
        with open(place, "rb") as file:
            return file.read()
    return None
