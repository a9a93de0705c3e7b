"""Media files, their labels, and a description of each file."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from feedline.core.arguments import whole_numbers
from feedline.core.caches import LRUCache
from feedline.core.paths import Pathlike
from feedline.datasets.file_objects import BlockFile
from feedline.datasets.indexes import Description, MetadataCache, key_of, metadata_path
from feedline.datasets.inflated import inflated
from feedline.datasets.media.members import TAR_ENDINGS, TarMembers
from feedline.datasets.paths import find_each, paths_of
from feedline.datasets.webdataset.tar import opener_of
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache, ObjectInfo, Store
from feedline.stores.files import FileSet, local_info
from feedline.stores.urls import absolute, is_local, local_path

MediaSource = str | BlockFile
"""The path of a file, or an object as a file object."""


class Piece(NamedTuple):
    """A file, or a part of it in seconds."""

    file: int
    label: int | None = None
    start: float | None = None
    stop: float | None = None


class WholeFiles(FileSet):
    """Files and objects that decoders open as a whole."""

    def source(self, number: int) -> MediaSource:
        """A file for a decoder; StateError if it has changed."""
        store, info = self.store(number), self.info(number)
        if store is not None:
            return BlockFile(self.open(number))
        info.state.check(local_info(info.path).state, info.path)
        return info.path


class MediaFiles:
    """Files, objects or members of tars, with their labels.

    They are from folders, tar shards or a manifest. Takes the arguments of `Clips`. `pieces` are the rows of the
    manifest, otherwise one per file. `classes` are the names of the labels, if these have names.
    """

    files: WholeFiles | TarMembers

    def __init__(
        self,
        paths: Pathlike | Sequence[Pathlike],
        manifest: Iterable[Mapping[str, Any]] | None,
        extensions: tuple[str, ...],
        cache: Cache | Pathlike | None,
        options: Mapping[str, Any] | None,
        index_dir: Pathlike | None,
    ) -> None:
        self.given = [os.fspath(absolute(each)) for each in paths_of(paths)]
        finding = partial(find_each, cache=cache, options=options)
        self.classes: list[str] = []
        if manifest is None:
            objects = _all_files(self.given, extensions, finding)
            if all(info.path.lower().endswith(TAR_ENDINGS) for _, info in objects):
                self.files = _tar_members(objects, extensions, cache, index_dir)
                self.pieces, self.classes = _labeled(self.files), self.files.classes
                return
            self.pieces = self._from_folders(objects)
        else:
            objects = self._from_manifest(list(manifest), finding)
        self.files = WholeFiles(objects)

    def _from_folders(self, objects: Sequence[tuple[Store | None, ObjectInfo]]) -> list[Piece]:
        below = _below(self.given, objects)
        if below is None or all("/" not in path for path in below):
            return [Piece(number) for number in range(len(objects))]
        outside = next((path for path in below if "/" not in path), None)
        if outside is not None:
            raise ArgumentError(
                f"{outside} is next to the class folders of {self.given[0]}, so it has no label: move it into one, "
                "remove it, or give a pattern such as '**/*.mp4' to read all files without labels"
            )
        names = [path.partition("/")[0] for path in below]
        self.classes = sorted(set(names))
        numbers = {name: number for number, name in enumerate(self.classes)}
        return [Piece(number, numbers[name]) for number, name in enumerate(names)]

    def _from_manifest(
        self, rows: list[Mapping[str, Any]], finding: Callable[..., Any]
    ) -> list[tuple[Store | None, ObjectInfo]]:
        if len(self.given) != 1:
            raise ArgumentError("a manifest needs one folder, to which its paths are relative")
        names = [str(_cell(row, "path", number)) for number, row in enumerate(rows)]
        distinct = {name: number for number, name in enumerate(dict.fromkeys(names))}
        root = self.given[0].rstrip("/")
        # Each name is literal, and may contain any characters.
        places = [_joined(root, name) for name in distinct]
        several = finding(places, "*")
        for name, place, found in zip(distinct, places, several, strict=True):
            # A folder stands for its files; the store of an object may spell its name in another way.
            if len(found) != 1 or (is_local(root) and not _is_path(place, found[0])):
                raise ArgumentError(
                    f"row {names.index(name)} of the manifest: path={name!r} is not a file in {self.given[0]}"
                )
        self.pieces = self._pieces(rows, [distinct[name] for name in names])
        return [one for (one,) in several]

    def _pieces(self, rows: list[Mapping[str, Any]], files: list[int]) -> list[Piece]:
        labels = [row.get("label") for row in rows]
        missing = next((number for number, label in enumerate(labels) if _is_missing(label)), None)
        if missing is not None and any(label is not None for label in labels):
            raise ArgumentError(
                f"row {missing} of the manifest has no label ({labels[missing]}): give all rows one, or none of them"
            )
        if any(isinstance(label, str) for label in labels):
            self.classes = sorted(set(map(str, labels)))
            numbers = {name: number for number, name in enumerate(self.classes)}
            labels = [numbers[str(label)] for label in labels]
        if missing is None:
            labels = whole_numbers("row {} of the manifest: label".format, labels, np.int64).tolist()
        pieces = []
        for number, (row, file, label) in enumerate(zip(rows, files, labels, strict=True)):
            start, stop = _seconds(row, "start", number), _seconds(row, "stop", number)
            if (start or 0) < 0 or (stop is not None and stop <= (start or 0)):
                raise ArgumentError(
                    f"row {number} of the manifest: start={start} and stop={stop} must be seconds, 0 <= start < stop"
                )
            pieces.append(Piece(file, label, start, stop))
        return pieces

    @property
    def has_labels(self) -> bool:
        return bool(self.pieces) and self.pieces[0].label is not None


class FileDescriptions:
    """A description of each file, kept in one index file.

    All manifests of a folder share it. `describe(number)` makes the bytes of a file's description, and `parse` an
    object of them. SampleErrors of damaged files are kept, too, and raised when such a file is used: one of a million
    must not prevent the others' use. They hold for one `library`: another version or build of the decoder may read the
    file.
    """

    def __init__(
        self,
        media: MediaFiles,
        kind: str,
        library: str,
        index_dir: Pathlike | None,
        describe: Callable[[int], bytes],
        parse: Callable[[bytes], Any],
    ) -> None:
        self._media, self._describe, self._parse = media, describe, parse
        self._bad = _BAD + library.encode() + b"\0"
        self._index = MetadataCache(metadata_path(kind, media.given, index_dir))
        self._recent: LRUCache[int, Any] = LRUCache(256)
        self._kind = kind

    def collect(self) -> list[bytes]:
        """The descriptions of all files; missing ones are built, several at once."""
        files = self._media.files
        keys = [self._key(number) for number in range(len(files))]
        entries = self._index.collect(
            self._kind, files.names, keys, self._guarded, is_usable=self._is_usable, keeps_others=True
        )
        return [bytes(entry) for entry in entries]

    def __getitem__(self, number: int) -> Any:
        """The parsed description; SampleError for a damaged file."""
        known = self._recent.get(number)
        if known is None:
            entry = self._index.get(self._key(number))
            if entry is None or not self._is_usable(entry):
                entry = self._guarded(number)
            known = self._recent.put(number, self.parsed(bytes(entry)))
        return known

    def parsed(self, entry: bytes) -> Any:
        """The parsed description; SampleError for a damaged file."""
        if entry[:1] == _BAD:
            raise SampleError(entry[len(self._bad) :].decode("utf-8", "surrogateescape"))
        return self._parse(entry[1:])

    def _guarded(self, number: int) -> bytes:
        try:
            return _GOOD + self._describe(number)
        except SampleError as error:
            return self._bad + str(error).encode("utf-8", "surrogateescape")  # as the names of files

    def _is_usable(self, entry: Description) -> bool:
        """False for an error of another library."""
        return entry[:1] != _BAD or entry[: len(self._bad)] == self._bad

    def _key(self, number: int) -> bytes | None:
        return key_of(self._media.files.name(number), self._media.files.info(number))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recent": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._recent = LRUCache(256)


_GOOD, _BAD = b"+", b"-"


def _all_files(
    given: Sequence[str], extensions: tuple[str, ...], finding: Callable[..., Any]
) -> list[tuple[Store | None, ObjectInfo]]:
    chosen = []
    for meant, several in zip(given, finding(given, "**/*"), strict=True):
        is_folder = not glob.has_magic(meant) and not (len(several) == 1 and _is_path(meant, several[0]))
        endings = extensions if any(each[1].path.lower().endswith(extensions) for each in several) else TAR_ENDINGS
        chosen += [each for each in several if not is_folder or each[1].path.lower().endswith(endings)]
    if not chosen:
        raise FileNotFoundError(f"no files in {', '.join(given)} end with {', '.join(extensions)}, or with .tar")
    return chosen


def _tar_members(
    objects: Sequence[tuple[Store | None, ObjectInfo]],
    extensions: tuple[str, ...],
    cache: Cache | Pathlike | None,
    index_dir: Pathlike | None,
) -> TarMembers:
    tars = FileSet(objects)
    return TarMembers(inflated(tars, [opener_of(name) for name in tars.names], cache), extensions, index_dir)


def _labeled(members: TarMembers) -> list[Piece]:
    """One piece per member; ArgumentError if only some have a label."""
    missing = next((number for number, label in enumerate(members.labels) if label is None), None)
    if missing is not None and any(label is not None for label in members.labels):
        raise ArgumentError(f"{members.name(missing)} has no label, but others have one: give all or none")
    return [Piece(number, label) for number, label in enumerate(members.labels)]


def _is_path(meant: str, each: tuple[Store | None, ObjectInfo]) -> bool:
    return PurePosixPath(meant).name == PurePosixPath(each[1].path).name


def _below(given: Sequence[str], objects: Sequence[tuple[Store | None, ObjectInfo]]) -> list[str] | None:
    """The paths below the folder; None if several folders were given."""
    if len(given) != 1 or glob.has_magic(given[0]) or (len(objects) == 1 and _is_path(given[0], objects[0])):
        return None
    if is_local(given[0]):
        root = Path(local_path(given[0]))
        return [Path(info.path).relative_to(root).as_posix() for _, info in objects]
    # The paths of objects are relative to their store, whose address ends with the folder.
    folder = "/" + given[0].split("://", 1)[1].strip("/") + "/"
    return [_after_folder(folder, "/" + info.path) for _, info in objects]


def _after_folder(folder: str, path: str) -> str:
    while folder != "/":
        if path.startswith(folder):
            return path[len(folder) :]
        folder = "/" + folder[1:].partition("/")[2]
    return path[1:]


def _joined(root: str, name: str) -> str:
    if is_local(root):
        inside = Path(local_path(root), name)
        return str(inside)
    return f"{root}/{name}"


def _cell(row: Mapping[str, Any], name: str, number: int) -> Any:
    try:
        return row[name]
    except (KeyError, TypeError) as error:
        raise ArgumentError(
            f"row {number} of the manifest has no {name!r}: give mappings with 'path', and where they apply 'label', "
            "'start' and 'stop' in seconds"
        ) from error


def _is_missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, (float, np.floating)) and bool(np.isnan(cell)))


def _seconds(row: Mapping[str, Any], name: str, number: int) -> float | None:
    value = row.get(name)
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = np.nan
    if not np.isfinite(seconds):
        raise ArgumentError(f"row {number} of the manifest: {name}={value!r} is not a number of seconds")
    return seconds
