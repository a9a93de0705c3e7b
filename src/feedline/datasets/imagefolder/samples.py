"""Paths and classes of images, packed."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from feedline.core.tensors import normalize_index
from feedline.datasets.strings import PackedBytes
from feedline.stores import ObjectInfo


class ObjectDetails(NamedTuple):
    """Size and version of each object, from a listing of the store."""

    sizes: NDArray[np.int64]
    versions: PackedBytes

    @classmethod
    def of(cls, infos: Sequence[ObjectInfo]) -> ObjectDetails:
        """The details of these objects."""
        sizes = np.fromiter((info.size for info in infos), np.int64, len(infos))
        return cls(sizes, PackedBytes.of(info.version.encode() for info in infos))

    def infos(self, paths: Sequence[str], places: NDArray[np.int64]) -> list[ObjectInfo]:
        """The objects at these indices, which have these paths."""
        each = zip(paths, self.sizes[places].tolist(), self.versions.many(places), strict=True)
        return [ObjectInfo(path, size, version.decode()) for path, size, version in each]


class ImageListing(NamedTuple):
    """File paths below a root, grouped by class, and counts per class."""

    paths: PackedBytes
    counts: NDArray[np.int64]
    details: ObjectDetails | None = None


class PathPacker:
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


class Samples(Sequence[tuple[str, int]]):
    """Sequence of `(path, class index)`, equal to torchvision's list.

    Items are built on access. `details` are the details in a remote listing. Pickles as arrays.
    """

    def __init__(
        self, beginning: str, paths: PackedBytes, targets: NDArray[np.int32], details: ObjectDetails | None = None
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
        at = normalize_index(index, len(self), "ImageFolder.samples")
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
