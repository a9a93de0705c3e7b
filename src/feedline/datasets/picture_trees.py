"""Where the class folders of an `ImageFolder` lie: on this machine, or in a store that tells of all of them at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.files import Pathlike
from feedline.datasets.folder_scan import Listing, Wanted, accepted, ending, kept_listing, listing
from feedline.datasets.image_samples import Samples
from feedline.datasets.packed_bytes import PackedBytes
from feedline.datasets.store_scan import Scan, kept_scan, scanned
from feedline.errors import SampleError
from feedline.stores import Cache, CachedStore, ObjectInfo, Want, open_store
from feedline.stores.addresses import local_path, scheme_of
from feedline.stores.wholes import Known, Wholes

Fetched = str | Future[memoryview]
"""The path of a picture, or its bytes on the way."""


class Choice(NamedTuple):
    """Which files are samples, and the file, if any, in which the listing of them is kept."""

    extensions: tuple[str, ...]
    is_valid: Callable[[str], bool] | None
    kept: str | None

    @property
    def wanted(self) -> Wanted:
        """The rule for the names in a folder."""
        return ending(self.extensions) if self.is_valid is None else accepted(self.is_valid)


class Tree(Protocol):
    """Class folders below a root; safe to use from several threads, and in other processes."""

    root: str
    """As people are told."""
    folder: bytes
    """What comes before the paths of a listing."""

    def classes(self, directory: Pathlike) -> list[str]:
        """The names of the class folders, sorted."""
        ...

    def listing(self, names: Sequence[str]) -> Listing:
        """The files in the folders of these names."""
        ...

    def fetching(self, samples: Samples, places: NDArray[np.int64], paths: Sequence[str]) -> Any:
        """A block within which the pictures at these places come, given their paths: a `Fetched` for each."""
        ...

    def wants(self, samples: Samples, places: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        """What a prefetch has to bring into a cache for these samples."""
        ...


def tree_at(root: str, choice: Choice, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None) -> Tree:
    """The tree at a path or an address."""
    if scheme_of(root) == "file":
        return LocalTree(local_path(root), choice)
    kept = Path(cache) if isinstance(cache, os.PathLike) else cache
    return StoreTree(Wholes(open_store(root, options=options, cache=kept)), choice)


class LocalTree:
    """Folders of this machine: pictures are read where they are decoded, from their paths."""

    def __init__(self, root: str, choice: Choice) -> None:
        self.root = os.path.expanduser(root)  # noqa: PTH111 - stays as it is written otherwise
        self.folder = os.fsencode(os.path.join(os.path.abspath(self.root), ""))  # noqa: PTH100, PTH118
        self._choice = choice

    def classes(self, directory: Pathlike) -> list[str]:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def listing(self, names: Sequence[str]) -> Listing:
        choice = self._choice
        if choice.kept is not None:
            return kept_listing(choice.kept, os.path.abspath(self.root), names, choice.extensions)  # noqa: PTH100
        return listing(self.root, names, choice.wanted)

    @contextmanager
    def fetching(self, _: Samples, __: NDArray[np.int64], paths: Sequence[str]) -> Iterator[Sequence[Fetched]]:
        yield paths

    def wants(self, _: Samples, __: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        return []

    def __getstate__(self) -> dict[str, Any]:
        # The choice has been made, and its function may not be one that travels.
        return {**self.__dict__, "_choice": self._choice._replace(is_valid=None)}


class StoreTree:
    """Folders of a store, listed once, here: the pictures of a batch are fetched all at once.

    What the listing told of them spares a lookup of each where a cache has to know its version.
    """

    def __init__(self, objects: Wholes, choice: Choice) -> None:
        store = self.store = objects.store
        self._objects = objects
        self.root = store.url
        self.folder = os.fsencode(f"{self.root}/")
        scan = (
            scanned(store, choice.wanted) if choice.kept is None else kept_scan(choice.kept, store, choice.extensions)
        )
        if not isinstance(store, CachedStore):
            scan = scan._replace(listing=scan.listing._replace(details=None))
        self._scan = scan

    def classes(self, _: Pathlike) -> list[str]:
        return list(self._scan.classes)

    def listing(self, names: Sequence[str]) -> Listing:
        return self._scan.chosen(names)

    @contextmanager
    def fetching(
        self, samples: Samples, places: NDArray[np.int64], paths: Sequence[str]
    ) -> Iterator[Sequence[Fetched]]:
        with self._objects.reading(self._known(samples, places, paths)) as futures:
            yield futures

    def wants(self, samples: Samples, places: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        if not isinstance(self.store, CachedStore):
            return []
        return self._objects.wants(self._known(samples, places, samples.files(places, self.folder)))

    def _known(self, samples: Samples, places: NDArray[np.int64], paths: Sequence[str]) -> list[Known]:
        inside = [self._inside(path) for path in paths]
        if samples.details is None:
            return [*inside]
        sizes, versions = samples.details
        each = zip(inside, sizes[places].tolist(), versions.many(places), strict=True)
        return [ObjectInfo(path, size, version.decode()) for path, size, version in each]

    def __getstate__(self) -> dict[str, Any]:
        # The samples have what they need of it.
        return {**self.__dict__, "_scan": Scan(self._scan.classes, Listing(PackedBytes.of(()), np.empty(0, np.int64)))}

    def _inside(self, path: str) -> str:
        if not path.startswith(f"{self.root}/"):
            raise SampleError(f"{path} does not lie below {self.root}, whose pictures this ImageFolder reads")
        return path.removeprefix(f"{self.root}/")
