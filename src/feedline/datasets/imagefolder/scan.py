"""Listings of class folders, local or remote, in torchvision's order.

`LocalTree` walks folders; `StoreTree` groups a single listing of a store. Both listings can be kept in a file.
`Samples` holds paths and classes packed.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from feedline.core.paths import Pathlike, special_entry
from feedline.core.tensors import one_within
from feedline.datasets import array_container
from feedline.datasets.indexes import place_of
from feedline.datasets.strings import PackedBytes
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache, CachedStore, ObjectInfo, ObjectRange, Store, open_store
from feedline.stores.files import Known, ObjectReader
from feedline.stores.urls import is_local, local_path


class Details(NamedTuple):
    """Size and version of each object, from a listing of the store."""

    sizes: NDArray[np.int64]
    versions: PackedBytes

    def taken(self, places: NDArray[np.int64]) -> Details:
        """Details of the objects at these indices."""
        return Details(self.sizes[places], PackedBytes.of(self.versions.many(places)))


class ImageListing(NamedTuple):
    """File paths below a root, grouped by class, and counts per class."""

    paths: PackedBytes
    counts: NDArray[np.int64]
    details: Details | None = None


class _Folder(NamedTuple):
    path: str
    modified_ns: int
    names: list[str]


Wanted = Callable[[str, list[str]], list[str]]
"""Filters the file names of a folder, given its path."""


def ending(extensions: tuple[str, ...]) -> Wanted:
    """A filter by extension, ignoring case."""
    return partial(_ending, extensions)


def _ending(extensions: tuple[str, ...], _: str, names: list[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(extensions)]


def accepted(is_valid: Callable[[str], bool]) -> Wanted:
    """A filter for files whose whole path satisfies `is_valid`."""
    return partial(_accepted, is_valid)


def _accepted(is_valid: Callable[[str], bool], folder: str, names: list[str]) -> list[str]:
    beginning = os.path.join(folder, "")  # noqa: PTH118 - as torchvision writes paths
    return [name for name in names if is_valid(beginning + name)]


def listing(
    root: str, classes: Sequence[str], wanted: Wanted, seen: list[tuple[str, int]] | None = None
) -> ImageListing:
    """List the wanted files of each class folder, relative to `root`.

    Within a class, folders are sorted by path, and the files of a folder by name. Links to folders are followed.
    Folders and their modification times are appended to `seen`.
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
    return ImageListing(paths.packed(), counts)


class _Paths:
    """Packs paths by folder; there may be ten million."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._lengths = array("q", [0])

    def add(self, folder: str, names: list[str]) -> int:
        """Add the files of a folder and return their number."""
        paths = [f"{folder}/{name}" for name in names]
        text = "".join(paths)
        data = os.fsencode(text)
        self._buffer += data
        self._lengths.extend(map(len, paths if len(data) == len(text) else map(os.fsencode, paths)))
        return len(paths)

    def packed(self) -> PackedBytes:
        return PackedBytes(np.cumsum(np.frombuffer(self._lengths, np.int64)), np.frombuffer(self._buffer, np.uint8))


def _folders(top: str) -> list[_Folder]:
    """The folder and its subfolders, sorted by path; empty if missing."""
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
        found.append(_Folder(here, modified_ns, names))
    return sorted(found, key=lambda folder: folder.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: counts as a file, whose error comes when it is read
        return False


def _check_loop(entry: os.DirEntry[str], here: str) -> None:
    if not entry.is_symlink():
        return
    inside, target = Path(here).resolve(), Path(entry.path).resolve()
    if inside.is_relative_to(target):
        raise ArgumentError(f"{entry.path} is a link to its own parent folder {target}: remove the link")


def kept_listing(path: str, root: str, classes: Sequence[str], extensions: tuple[str, ...]) -> ImageListing:
    """Load the listing in the file `path`, or build and write it.

    It is built again if a folder has changed: an added or removed file changes the folder's modification time.
    """
    asked = {"root": root, "classes": list(classes), "extensions": list(extensions)}
    if Path(path).exists():
        stored = array_container.open_mapped(path)
        if "folder_times" not in stored.arrays:
            raise SampleError(f"{path} is not the listing of an ImageFolder: give another index_dir=, or remove it")
        if stored.metadata == asked and _unchanged(root, stored.arrays):
            return ImageListing(PackedBytes(stored.arrays["bounds"], stored.arrays["bytes"]), stored.arrays["counts"])
    seen: list[tuple[str, int]] = []
    images = listing(root, classes, ending(extensions), seen)
    _keep(path, asked, _columns(images, seen))
    return images


def _keep(path: str, asked: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a listing; ArgumentError if it cannot be written."""
    try:
        array_container.write(path, asked, arrays)
    except OSError as error:
        raise ArgumentError(
            f"the listing {path!r} cannot be written ({error.strerror}): give a writable folder as index_dir=,"
            " or leave it out"
        ) from error


def _columns(images: ImageListing, seen: Sequence[tuple[str, int]]) -> dict[str, NDArray[Any]]:
    folders = PackedBytes.of(os.fsencode(folder) for folder, _ in seen)
    return {
        "bounds": images.paths.offsets,
        "bytes": images.paths.buffer,
        "counts": images.counts,
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
    except OSError:  # removed, or replaced by a file
        return False


_NAMES = ("bounds", "bytes", "counts", "sizes", "version_bounds", "version_bytes")


class Scan(NamedTuple):
    """All classes, sorted, and the wanted objects of each in order."""

    classes: list[str]
    listing: ImageListing

    def chosen(self, names: Sequence[str]) -> ImageListing:
        """The objects of these classes, in this order; unknown classes are empty."""
        if list(names) == self.classes:
            return self.listing
        paths, counts, details = self.listing
        stops = dict(zip(self.classes, np.cumsum(counts).tolist(), strict=True))
        known = dict(zip(self.classes, counts.tolist(), strict=True))
        chosen = [known.get(name, 0) for name in names]
        ranges = [np.arange(stops.get(name, 0) - known.get(name, 0), stops.get(name, 0)) for name in names]
        places = np.concatenate(ranges) if ranges else np.empty(0, np.int64)
        return ImageListing(
            PackedBytes.of(paths.many(places)),
            np.array(chosen, np.int64),
            None if details is None else details.taken(places),
        )


def scan_store(store: Store, wanted: Wanted) -> Scan:
    """List the class folders of a store.

    Objects of a folder are sorted by name, folders by path.
    """
    classes: dict[str, dict[str, dict[str, ObjectInfo]]] = {}
    for info in store.list():
        folder, _, name = info.path.rpartition("/")
        if folder and name:
            classes.setdefault(folder.partition("/")[0], {}).setdefault(folder, {})[name] = info
    found = [list(_chosen(store.url, classes[name], wanted)) for name in sorted(classes)]
    infos = [info for each in found for info in each]
    details = Details(
        np.fromiter((info.size for info in infos), np.int64, len(infos)),
        PackedBytes.of(info.version.encode() for info in infos),
    )
    paths = PackedBytes.of(os.fsencode(info.path) for info in infos)
    return Scan(sorted(classes), ImageListing(paths, np.array([len(each) for each in found], np.int64), details))


def _chosen(url: str, folders: dict[str, dict[str, ObjectInfo]], wanted: Wanted) -> Iterator[ObjectInfo]:
    for folder in sorted(folders):
        named = folders[folder]
        for name in sorted(wanted(f"{url}/{folder}", list(named))):
            yield named[name]


def kept_scan(path: str, store: Store, extensions: tuple[str, ...]) -> Scan:
    """Load the scan in the file `path`, or build and write it.

    It is built again for another address. Changes of the store are not detected; remove the file to list it again.
    """
    asked = {"address": store.url, "extensions": list(extensions)}
    if Path(path).exists():
        stored = array_container.open_mapped(path)
        if not all(name in stored.arrays for name in _NAMES):
            raise SampleError(
                f"{path} is not the listing of an ImageFolder in a store: give another index_dir=, or remove it"
            )
        if {name: stored.metadata.get(name) for name in asked} == asked:
            return _as_scan(stored)
    scan = scan_store(store, ending(extensions))
    _keep(path, {**asked, "classes": scan.classes}, _store_columns(scan.listing))
    return scan


def _store_columns(images: ImageListing) -> dict[str, NDArray[Any]]:
    paths, counts, details = images
    assert details is not None
    versions = details.versions
    columns = (paths.offsets, paths.buffer, counts, details.sizes, versions.offsets, versions.buffer)
    return dict(zip(_NAMES, columns, strict=True))


def _as_scan(stored: array_container.NamedArrays) -> Scan:
    bounds, data, counts, sizes, version_bounds, version_bytes = (stored.arrays[name] for name in _NAMES)
    details = Details(sizes, PackedBytes(version_bounds, version_bytes))
    return Scan(stored.metadata["classes"], ImageListing(PackedBytes(bounds, data), counts, details))


class Samples(Sequence[tuple[str, int]]):
    """Sequence of `(path, class index)`, equal to torchvision's list.

    Items are built on access. `details` are those of a remote listing. Pickles as arrays.
    """

    def __init__(
        self, beginning: str, paths: PackedBytes, targets: NDArray[np.int32], details: Details | None = None
    ) -> None:
        self._beginning = beginning
        self._paths, self._targets = paths, targets
        self.details = details

    def __len__(self) -> int:
        return len(self._targets)

    @overload
    def __getitem__(self, index: int) -> tuple[str, int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, int]]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, int] | list[tuple[str, int]]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = one_within(index, len(self), "ImageFolder.samples")
        return self._beginning + os.fsdecode(self._paths[at]), int(self._targets[at])

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:2]))
        return f"[{shown}{', …' * (len(self) > 2)}]"

    def files(self, places: NDArray[np.int64], folder: bytes) -> list[str]:
        """Paths at checked indices, below `folder`."""
        return [(folder + path).decode("utf-8", "surrogateescape") for path in self._paths.many(places)]

    def targets(self, places: NDArray[np.int64] | slice) -> NDArray[np.int32]:
        """Class indices of these samples."""
        return self._targets[places]


Fetched = str | Future[memoryview]
"""Path of an image, or a future of its bytes."""


class Choice(NamedTuple):
    """Selection of sample files, and the folder for their listing, if any."""

    extensions: tuple[str, ...]
    is_valid: Callable[[str], bool] | None
    index_dir: str | None

    def listing_file(self, root: str) -> str | None:
        """Path of the file for the listing of `root`, or None."""
        return None if self.index_dir is None else place_of("imagefolder", [root], self.index_dir)

    @property
    def wanted(self) -> Wanted:
        """The rule for the names in a folder."""
        return ending(self.extensions) if self.is_valid is None else accepted(self.is_valid)


class ClassFolders(Protocol):
    """Class folders below a root; thread-safe and picklable."""

    root: str
    """The root as shown in messages."""
    folder: bytes
    """Prefix of the paths of a listing."""

    def classes(self, directory: Pathlike) -> list[str]:
        """Sorted names of the class folders."""
        ...

    def listing(self, names: Sequence[str]) -> ImageListing:
        """The files in these class folders."""
        ...

    def fetching(self, samples: Samples, places: NDArray[np.int64], paths: Sequence[str]) -> Any:
        """A context manager that fetches these images, a `Fetched` for each."""
        ...

    def ranges(self, samples: Samples, places: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Cache and byte range of every read for these samples."""
        ...


def tree_at(
    root: str, choice: Choice, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None
) -> ClassFolders:
    """The class folders at a path or an address."""
    if is_local(root):
        return LocalTree(local_path(root), choice)
    kept = Path(cache) if isinstance(cache, os.PathLike) else cache
    return StoreTree(ObjectReader(open_store(root, options=options, cache=kept)), choice)


class LocalTree:
    """Folders of this machine; images are read by path when decoded."""

    def __init__(self, root: str, choice: Choice) -> None:
        self.root = os.path.expanduser(root)  # noqa: PTH111 - stays as it is written otherwise
        self.folder = os.fsencode(os.path.join(os.path.abspath(self.root), ""))  # noqa: PTH100, PTH118
        self._choice = choice

    def classes(self, directory: Pathlike) -> list[str]:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def listing(self, names: Sequence[str]) -> ImageListing:
        choice, root = self._choice, os.path.abspath(self.root)  # noqa: PTH100
        place = choice.listing_file(root)
        if place is not None:
            return kept_listing(place, root, names, choice.extensions)
        return listing(self.root, names, choice.wanted)

    @contextmanager
    def fetching(self, _: Samples, __: NDArray[np.int64], paths: Sequence[str]) -> Iterator[Sequence[Fetched]]:
        yield paths

    def ranges(self, _: Samples, __: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        return []

    def __getstate__(self) -> dict[str, Any]:
        # The listing is complete without the function, which may not be picklable.
        return {**self.__dict__, "_choice": self._choice._replace(is_valid=None)}


class StoreTree:
    """Folders of a store, listed once; images are fetched by batch.

    Sizes and versions from the listing save a look-up of each object when there is a cache.
    """

    def __init__(self, objects: ObjectReader, choice: Choice) -> None:
        store = self.store = objects.store
        self._objects = objects
        self.root = store.url
        self.folder = os.fsencode(f"{self.root}/")
        place = choice.listing_file(store.url)
        scan = scan_store(store, choice.wanted) if place is None else kept_scan(place, store, choice.extensions)
        if not isinstance(store, CachedStore):
            scan = scan._replace(listing=scan.listing._replace(details=None))
        self._scan = scan

    def classes(self, _: Pathlike) -> list[str]:
        return list(self._scan.classes)

    def listing(self, names: Sequence[str]) -> ImageListing:
        return self._scan.chosen(names)

    @contextmanager
    def fetching(
        self, samples: Samples, places: NDArray[np.int64], paths: Sequence[str]
    ) -> Iterator[Sequence[Fetched]]:
        with self._objects.reading(self._known(samples, places, paths)) as futures:
            yield futures

    def ranges(self, samples: Samples, places: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        if not isinstance(self.store, CachedStore):
            return []
        return self._objects.ranges(self._known(samples, places, samples.files(places, self.folder)))

    def _known(self, samples: Samples, places: NDArray[np.int64], paths: Sequence[str]) -> list[Known]:
        inside = [self._inside(path) for path in paths]
        if samples.details is None:
            return [*inside]
        sizes, versions = samples.details
        each = zip(inside, sizes[places].tolist(), versions.many(places), strict=True)
        return [ObjectInfo(path, size, version.decode()) for path, size, version in each]

    def __getstate__(self) -> dict[str, Any]:
        # Samples hold the listing; pickling it twice would double the size.
        return {
            **self.__dict__,
            "_scan": Scan(self._scan.classes, ImageListing(PackedBytes.of(()), np.empty(0, np.int64))),
        }

    def _inside(self, path: str) -> str:
        if not path.startswith(f"{self.root}/"):
            raise SampleError(f"{path} is outside {self.root}, the root of this ImageFolder")
        return path.removeprefix(f"{self.root}/")
