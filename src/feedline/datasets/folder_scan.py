"""The files of a tree of class folders, in torchvision's order, and a listing of them that can be kept in a file."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.packed_bytes import PackedBytes
from feedline.errors import ArgumentError, SampleError
from feedline.shards import arrays
from feedline.stores.whereabouts import special_entry


class Details(NamedTuple):
    """Size and version of each object, as a listing of its store told them."""

    sizes: NDArray[np.int64]
    versions: PackedBytes

    def taken(self, places: NDArray[np.int64]) -> Details:
        """Those of the objects at these places."""
        return Details(self.sizes[places], PackedBytes.of(self.versions.many(places)))


class Listing(NamedTuple):
    """Paths of files below a root, class after class, and how many there are of each class."""

    paths: PackedBytes
    counts: NDArray[np.int64]
    details: Details | None = None


class _Folder(NamedTuple):
    path: str
    modified_ns: int
    names: list[str]


Wanted = Callable[[str, list[str]], list[str]]
"""From the path of a folder and the names of its files to those of them that are meant."""


def ending(extensions: tuple[str, ...]) -> Wanted:
    """The names that end so, in capitals or not."""
    return partial(_ending, extensions)


def _ending(extensions: tuple[str, ...], _: str, names: list[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(extensions)]


def accepted(is_valid: Callable[[str], bool]) -> Wanted:
    """The names of the files of which a function of the whole path says so."""
    return partial(_accepted, is_valid)


def _accepted(is_valid: Callable[[str], bool], folder: str, names: list[str]) -> list[str]:
    beginning = os.path.join(folder, "")  # noqa: PTH118 - as torchvision writes paths
    return [name for name in names if is_valid(beginning + name)]


def listing(root: str, classes: Sequence[str], wanted: Wanted, seen: list[tuple[str, int]] | None = None) -> Listing:
    """The wanted files below each class folder of `root`, by paths relative to it.

    In each class the folders are sorted by their whole paths, and in each folder the files by their names. Links to
    folders are followed. `seen` is given the folders and their times of modification.
    """
    counts = np.zeros(len(classes), np.int64)
    skipped = len(os.path.join(root, ""))  # noqa: PTH118
    paths = _Paths()
    for number, name in enumerate(classes):
        for folder in _folders(os.path.join(root, name)):  # noqa: PTH118
            inside = folder.path[skipped:]
            if seen is not None:
                seen.append((inside, folder.modified_ns))
            counts[number] += paths.add(inside, sorted(wanted(folder.path, folder.names)))
    return Listing(paths.packed(), counts)


class _Paths:
    """Paths on their way into two arrays, folder by folder: there may be ten million."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._lengths = array("q", [0])

    def add(self, folder: str, names: list[str]) -> int:
        """Add the files of a folder; gives their number."""
        paths = [f"{folder}/{name}" for name in names]
        text = "".join(paths)
        data = os.fsencode(text)
        self._buffer += data
        self._lengths.extend(map(len, paths if len(data) == len(text) else map(os.fsencode, paths)))
        return len(paths)

    def packed(self) -> PackedBytes:
        return PackedBytes(np.cumsum(np.frombuffer(self._lengths, np.int64)), np.frombuffer(self._buffer, np.uint8))


def _folders(top: str) -> list[_Folder]:
    """The folder and all below it, sorted by path, with the names of their files; none if there is no folder."""
    if not Path(top).is_dir():
        return []
    found, waiting = [], [top]
    while waiting:
        here, names = waiting.pop(), []
        modified_ns = os.stat(here).st_mtime_ns  # noqa: PTH116 - before it is read: what comes later shows
        with os.scandir(here) as entries:
            for entry in entries:
                if _is_folder(entry):
                    _refuse_loop(entry, here)
                    waiting.append(entry.path)
                elif not special_entry(entry):
                    names.append(entry.name)
        found.append(_Folder(here, modified_ns, names))
    return sorted(found, key=lambda folder: folder.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: a file that cannot be read, which is said when somebody does
        return False


def _refuse_loop(entry: os.DirEntry[str], here: str) -> None:
    if not entry.is_symlink():
        return
    inside, target = Path(here).resolve(), Path(entry.path).resolve()
    if inside.is_relative_to(target):
        raise ArgumentError(f"{entry.path} is a link to {target}, in which it lies itself: remove the link")


def kept_listing(path: str, root: str, classes: Sequence[str], extensions: tuple[str, ...]) -> Listing:
    """The listing in the file `path`; made and written there if there is none, or if a folder has changed since.

    A file that is added or removed changes the time of its folder, and each folder is asked for its time.
    """
    asked = {"root": root, "classes": list(classes), "extensions": list(extensions)}
    if Path(path).exists():
        held = arrays.opened(path)
        if "folder_times" not in held.arrays:
            raise SampleError(f"{path} is not the listing of an ImageFolder: give listing= another place, or remove it")
        if held.told == asked and _unchanged(root, held.arrays):
            return Listing(PackedBytes(held.arrays["bounds"], held.arrays["bytes"]), held.arrays["counts"])
    seen: list[tuple[str, int]] = []
    made = listing(root, classes, ending(extensions), seen)
    keep(path, arrays.packed(asked, _columns(made, seen)))
    return made


def keep(path: str, pieces: Sequence[bytes | memoryview]) -> None:
    """Write a listing; ArgumentError if it cannot be kept there."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        arrays.write(path, pieces)
    except OSError as error:
        raise ArgumentError(
            f"listing={path!r} cannot be written ({error.strerror}): give a file in a folder that can be written to, "
            "or leave listing= out"
        ) from error


def _columns(made: Listing, seen: Sequence[tuple[str, int]]) -> dict[str, NDArray[Any]]:
    folders = PackedBytes.of(os.fsencode(folder) for folder, _ in seen)
    return {
        "bounds": made.paths.offsets,
        "bytes": made.paths.buffer,
        "counts": made.counts,
        "folder_bounds": folders.offsets,
        "folder_bytes": folders.buffer,
        "folder_times": np.array([modified_ns for _, modified_ns in seen], np.int64),
    }


def _unchanged(root: str, held: Mapping[str, NDArray[Any]]) -> bool:
    folders = PackedBytes(held["folder_bounds"], held["folder_bytes"])
    times = held["folder_times"].tolist()
    try:
        return all(
            os.stat(os.path.join(root, os.fsdecode(folders[at]))).st_mtime_ns == time  # noqa: PTH116, PTH118
            for at, time in enumerate(times)
        )
    except OSError:  # gone, or no folder any more
        return False
