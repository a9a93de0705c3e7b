"""Listings of class folders, local or in a store, in torchvision's order.

`ImageTree` finds the folders of a class: folders of this machine are scanned, and a single listing of a store is
grouped. All other code is the same for both. A listing can be kept in a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core.paths import Pathlike, special_entry
from feedline.datasets.array_container import NamedArrays
from feedline.datasets.imagefolder.samples import ImageListing, ObjectDetails, PathPacker, Samples
from feedline.datasets.indexes import IndexFile, metadata_path
from feedline.datasets.strings import PackedBytes
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache, CachedStore, ObjectInfo, ObjectRange, Store, open_store
from feedline.stores.cache import cache_of
from feedline.stores.object_reader import Fetched, KnownObject, ObjectReader
from feedline.stores.urls import is_local, local_path

NameFilter = Callable[[str, list[str]], list[str]]
"""Filters the file names of a folder, given its path."""


def by_extension(extensions: tuple[str, ...]) -> NameFilter:
    """A filter by extension, ignoring case."""
    return partial(_with_extension, extensions)


def _with_extension(extensions: tuple[str, ...], _: str, names: list[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(extensions)]


def by_path(is_valid: Callable[[str], bool]) -> NameFilter:
    """A filter for files whose whole path satisfies `is_valid`."""
    return partial(_with_valid_path, is_valid)


def _with_valid_path(is_valid: Callable[[str], bool], folder: str, names: list[str]) -> list[str]:
    beginning = os.path.join(folder, "")  # noqa: PTH118 - as torchvision writes paths
    return [name for name in names if is_valid(beginning + name)]


class FileSelection(NamedTuple):
    """Selection of sample files, and the folder for their listing, if any."""

    extensions: tuple[str, ...]
    is_valid: Callable[[str], bool] | None
    index_dir: str | None

    def listing_file(self, root: str) -> str | None:
        """Path of the file for the listing of `root`, or None."""
        return None if self.index_dir is None else metadata_path("imagefolder", [root], self.index_dir)

    @property
    def name_filter(self) -> NameFilter:
        """The rule for the names in a folder."""
        return by_extension(self.extensions) if self.is_valid is None else by_path(self.is_valid)


class FolderFiles(NamedTuple):
    """The files of one folder.

    `infos` has those of a store by name.
    """

    path: str
    modified_ns: int
    names: list[str]
    infos: Mapping[str, ObjectInfo] | None = None


class _Listed(NamedTuple):
    """A listing, and the modification times of its local folders."""

    images: ImageListing
    folder_times: Mapping[str, int]

    def columns(self) -> dict[str, NDArray[Any]]:
        """The arrays of the file that keeps the listing."""
        paths, counts, details = self.images
        folders = PackedBytes.of(map(os.fsencode, self.folder_times))
        columns: dict[str, NDArray[Any]] = {
            "bounds": paths.offsets,
            "bytes": paths.buffer,
            "counts": counts,
            "folder_bounds": folders.offsets,
            "folder_bytes": folders.buffer,
            "folder_times": np.array([*self.folder_times.values()], np.int64),
        }
        if details is not None:
            versions = details.versions
            columns |= {
                "sizes": details.sizes,
                "version_bounds": versions.offsets,
                "version_bytes": versions.buffer,
            }
        return columns


class ImageTree:
    """Class folders below a root of this machine or of a store.

    A store is listed once. Sizes and versions from the listing save a look-up of each object when there is a cache.
    Thread-safe; pickles without the listing, which the samples hold.
    """

    def __init__(
        self, root: str, selection: FileSelection, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None
    ) -> None:
        self.store: Store | None = None
        """The store of the root; None for a local one."""
        if is_local(root):
            self.root = os.path.expanduser(local_path(root))  # noqa: PTH111 - stays as it is written otherwise
            self._place = os.path.abspath(self.root)  # noqa: PTH100
        else:
            self.store = open_store(root, options=options, cache=cache)
            self.root = self._place = self.store.url
        self.folder = os.fsencode(os.path.join(self._place, ""))  # noqa: PTH118
        """Prefix of the paths of a listing."""
        self._objects = ObjectReader(self.store)
        self._selection = selection
        self._listing_file = selection.listing_file(self._place)
        self._by_class: dict[str, list[FolderFiles]] | None = None

    def classes(self, directory: Pathlike) -> list[str]:
        """Sorted names of the class folders."""
        if self.store is None:
            with os.scandir(directory) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        stored = self._open_listing()
        if stored is not None and self._by_class is None:
            return list(stored.metadata["all_classes"])
        return sorted(self._listed_store(self.store))

    def listing(self, names: Sequence[str]) -> ImageListing:
        """The wanted files in these class folders.

        With a listing file, they are loaded from that file, or written to it. The file is built again for other
        arguments, and if a folder of this machine has changed: an added or removed file changes the folder's
        modification time. Changes of a store are not detected; remove the file to list the store again.
        """
        stored, asked = self._open_listing(), {**self._request, "classes": list(names)}
        if stored is not None and stored.metadata["classes"] == asked["classes"] and _unchanged(self.root, stored):
            return self._drop_unused_details(_listing_in(stored.arrays))
        found = _list(map(self._folders, names), self.root, self._selection.name_filter)
        if self._listing_file is not None:
            asked["all_classes"] = sorted(self._by_class or ())
            _keep(IndexFile(self._listing_file, asked), found.columns())
        self._by_class = None
        return self._drop_unused_details(found.images)

    def _drop_unused_details(self, images: ImageListing) -> ImageListing:
        return images if cache_of(self.store) is not None else images._replace(details=None)

    @property
    def _request(self) -> dict[str, Any]:
        return {"root": self._place, "extensions": list(self._selection.extensions)}

    def _open_listing(self) -> NamedArrays | None:
        """The listing file, if it has this root and these extensions."""
        if self._listing_file is None:
            return None
        index = IndexFile(self._listing_file, self._request)
        try:
            stored = index.open()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if "folder_times" not in stored.arrays:
            raise SampleError(
                f"{index.path} is not the listing of an ImageFolder: give another index_dir=, or remove it"
            )
        return stored if index.describes(stored) else None

    def _folders(self, name: str) -> list[FolderFiles]:
        """The folder of a class and its subfolders, sorted by path."""
        if self.store is None:
            return _walk(os.path.join(self.root, name))  # noqa: PTH118
        return self._listed_store(self.store).get(name, [])

    def _listed_store(self, store: Store) -> dict[str, list[FolderFiles]]:
        if self._by_class is None:
            self._by_class = _folders_of(store)
        return self._by_class

    def fetching(
        self, samples: Samples, places: NDArray[np.int64], paths: Sequence[str]
    ) -> AbstractContextManager[Sequence[Fetched]]:
        """A context manager that fetches these images."""
        return self._objects.fetching(self._identify(samples, places, paths))

    def content(self, fetched: Fetched) -> str | memoryview:
        """The content of an object, or the path of a file."""
        if isinstance(fetched, str):
            return fetched
        assert self.store is not None
        return self._objects.result(self.store, fetched)

    def ranges(
        self, samples: Samples, places: NDArray[np.int64], folder: bytes
    ) -> list[tuple[CachedStore, ObjectRange]]:
        """Cache and byte range of every read for these samples.

        Their paths are below `folder`.
        """
        if cache_of(self.store) is None:
            return []
        return self._objects.ranges(self._identify(samples, places, samples.files(places, folder)))

    def _identify(self, samples: Samples, places: NDArray[np.int64], paths: Sequence[str]) -> Sequence[KnownObject]:
        if self.store is None:
            return paths
        inside = self.inside(paths)
        return inside if samples.details is None else samples.details.infos(inside, places)

    def inside(self, paths: Sequence[str]) -> list[str]:
        """The paths of images in the store; SampleError for others."""
        beginning = f"{self.root}/"
        for path in paths:
            if not path.startswith(beginning):
                raise SampleError(f"{path} is outside {self.root}, the root of this ImageFolder")
        return [path.removeprefix(beginning) for path in paths]

    def __getstate__(self) -> dict[str, Any]:
        # The listing no longer needs the function, which may not be picklable.
        return {**self.__dict__, "_selection": self._selection._replace(is_valid=None), "_by_class": None}


def _list(classes: Iterable[list[FolderFiles]], root: str, name_filter: NameFilter) -> _Listed:
    """List the wanted files of each class, relative to `root`.

    Within a class, folders are sorted by path, and the files of a folder by name.
    """
    skipped = len(os.path.join(root, ""))  # noqa: PTH118
    paths, counts, times, infos = PathPacker(), list[int](), dict[str, int](), list[ObjectInfo]()
    in_store = False
    for folders in classes:
        counts.append(0)
        for folder in folders:
            inside, names = folder.path[skipped:], sorted(name_filter(folder.path, folder.names))
            counts[-1] += paths.add(inside, names)
            if folder.infos is None:
                times[inside] = folder.modified_ns
            else:
                in_store = True
                infos += map(folder.infos.__getitem__, names)
    details = ObjectDetails.of(infos) if in_store else None
    return _Listed(ImageListing(paths.packed(), np.array(counts, np.int64), details), times)


def _walk(top: str) -> list[FolderFiles]:
    """The folder and its subfolders, sorted by path; empty if missing.

    Links to folders are followed.
    """
    if not Path(top).is_dir():
        return []
    found, waiting = [], [top]
    while waiting:
        here, names = waiting.pop(), []
        modified_ns = os.stat(here).st_mtime_ns  # noqa: PTH116 - before the scan: later changes show as a newer time
        with os.scandir(here) as entries:
            for entry in entries:
                if _is_folder(entry):
                    _check_loop(entry, here)
                    waiting.append(entry.path)
                elif not special_entry(entry):
                    names.append(entry.name)
        found.append(FolderFiles(here, modified_ns, names))
    return sorted(found, key=lambda folder: folder.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself counts as a file, and raises an error when it is read
        return False


def _check_loop(entry: os.DirEntry[str], here: str) -> None:
    if not entry.is_symlink():
        return
    inside, target = Path(here).resolve(), Path(entry.path).resolve()
    if inside.is_relative_to(target):
        raise ArgumentError(f"{entry.path} is a link to its own parent folder {target}: remove the link")


def _folders_of(store: Store) -> dict[str, list[FolderFiles]]:
    """The folders of each class of a store, sorted by path."""
    classes: dict[str, dict[str, dict[str, ObjectInfo]]] = {}
    for info in store.list():
        folder, _, name = info.path.rpartition("/")
        if folder and name:
            classes.setdefault(folder.partition("/")[0], {}).setdefault(folder, {})[name] = info
    return {
        name: [FolderFiles(f"{store.url}/{path}", 0, list(files), files) for path, files in sorted(folders.items())]
        for name, folders in classes.items()
    }


def _keep(index: IndexFile, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a listing; ArgumentError if it cannot be written."""
    try:
        index.save(arrays)
    except OSError as error:
        raise ArgumentError(
            f"the listing {index.path!r} cannot be written ({error.strerror}): give a writable folder as index_dir=,"
            " or leave it out"
        ) from error


def _listing_in(arrays: Mapping[str, NDArray[Any]]) -> ImageListing:
    details = None
    if "sizes" in arrays:
        details = ObjectDetails(arrays["sizes"], PackedBytes(arrays["version_bounds"], arrays["version_bytes"]))
    return ImageListing(PackedBytes(arrays["bounds"], arrays["bytes"]), arrays["counts"], details)


def _unchanged(root: str, stored: NamedArrays) -> bool:
    """True if all local folders of a listing have their modification times."""
    folders = PackedBytes(stored.arrays["folder_bounds"], stored.arrays["folder_bytes"])
    times = stored.arrays["folder_times"].tolist()
    try:
        return all(
            os.stat(os.path.join(root, os.fsdecode(folders[at]))).st_mtime_ns == time  # noqa: PTH116, PTH118
            for at, time in enumerate(times)
        )
    except OSError:  # removed, or replaced by a file
        return False
