"""The class folders of a store, from one listing of all that lies in them, in torchvision's order; kept if wished."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.folder_scan import Details, Listing, Wanted, ending, keep
from feedline.datasets.packed_bytes import PackedBytes
from feedline.errors import SampleError
from feedline.shards import arrays
from feedline.stores import ObjectInfo, Store

_NAMES = ("bounds", "bytes", "counts", "sizes", "version_bounds", "version_bytes")


class Scan(NamedTuple):
    """All classes there are, sorted, and the wanted objects of each, in their order."""

    classes: list[str]
    listing: Listing

    def chosen(self, names: Sequence[str]) -> Listing:
        """The objects of these classes, class after class; none of a class that is not there."""
        if list(names) == self.classes:
            return self.listing
        paths, counts, details = self.listing
        stops = dict(zip(self.classes, np.cumsum(counts).tolist(), strict=True))
        known = dict(zip(self.classes, counts.tolist(), strict=True))
        chosen = [known.get(name, 0) for name in names]
        ranges = [np.arange(stops.get(name, 0) - known.get(name, 0), stops.get(name, 0)) for name in names]
        places = np.concatenate(ranges) if ranges else np.empty(0, np.int64)
        return Listing(
            PackedBytes.of(paths.many(places)),
            np.array(chosen, np.int64),
            None if details is None else details.taken(places),
        )


def scanned(store: Store, wanted: Wanted) -> Scan:
    """What lies in the folders at the top of a store; each folder's objects by name, and folders by their paths."""
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
    return Scan(sorted(classes), Listing(paths, np.array([len(each) for each in found], np.int64), details))


def _chosen(url: str, folders: dict[str, dict[str, ObjectInfo]], wanted: Wanted) -> Iterator[ObjectInfo]:
    for folder in sorted(folders):
        named = folders[folder]
        for name in sorted(wanted(f"{url}/{folder}", list(named))):
            yield named[name]


def kept_scan(path: str, store: Store, extensions: tuple[str, ...]) -> Scan:
    """The scan in the file `path`; made and written there if there is none, or one of another address.

    Whether objects came or went since nothing tells but another listing: remove the file to have one.
    """
    asked = {"address": store.url, "extensions": list(extensions)}
    if Path(path).exists():
        held = arrays.opened(path)
        if not all(name in held.arrays for name in _NAMES):
            raise SampleError(
                f"{path} is not the listing of an ImageFolder in a store: give listing= another place, or remove it"
            )
        if {name: held.told.get(name) for name in asked} == asked:
            return _held(held)
    made = scanned(store, ending(extensions))
    keep(path, arrays.packed({**asked, "classes": made.classes}, _columns(made.listing)))
    return made


def _columns(made: Listing) -> dict[str, NDArray[Any]]:
    paths, counts, details = made
    assert details is not None
    versions = details.versions
    columns = (paths.offsets, paths.buffer, counts, details.sizes, versions.offsets, versions.buffer)
    return dict(zip(_NAMES, columns, strict=True))


def _held(held: arrays.Arrays) -> Scan:
    bounds, data, counts, sizes, version_bounds, version_bytes = (held.arrays[name] for name in _NAMES)
    details = Details(sizes, PackedBytes(version_bounds, version_bytes))
    return Scan(held.told["classes"], Listing(PackedBytes(bounds, data), counts, details))
