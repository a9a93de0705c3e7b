"""Construction of the index of a tar, from its members.

`SampleTable` maps members to samples and fields, `ImageSizeScanner` reads image sizes on the way, and `fingerprint`
identifies a tar by a few of its bytes when size and time do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline import images
from feedline.core import kernels
from feedline.datasets import array_container
from feedline.datasets.webdataset.sources import TarSource
from feedline.datasets.webdataset.tar import BLOCK, ShardError, TarMember, TarWalk, extension, is_image, split
from feedline.errors import ArgumentError, SampleError
from feedline.stores.base import FileVersion

MeasureGrid = Callable[[memoryview], NDArray[np.uint16] | None]
"""Maps an encoded image to the lengths of its restart intervals; None for one without a grid."""


Cell = tuple[int, int]
"""Row of a sample and column of a field."""


_GLANCE_NBYTES = 64 << 10
"""Number of bytes read first: nearly every image header fits into them, so that no further bytes of an object are
fetched.
"""


_MOST_NBYTES = 64 << 20
"""Most bytes of an image in memory, for any size in a header."""


class ImageSizeScanner:
    """Reads sizes and restart intervals of images while a tar is indexed.

    Unreadable images are skipped; reading their sample raises the error.
    """

    def __init__(self, source: TarSource, measure: MeasureGrid | None) -> None:
        self._source = source
        self._measure = measure
        self.sizes: dict[Cell, tuple[int, int]] = {}
        """Width and height of images, and of arrays that may be images."""
        self.lengths: dict[Cell, NDArray[np.uint16]] = {}
        """Restart interval lengths of JPEGs with a grid."""

    def add(self, cell: Cell, member: TarMember) -> None:
        """Scan a member if it may be an image."""
        if is_image(member.name.lower()):
            self.sizes[cell] = self._image_size(member)
            if self._measure is not None and member.size <= _MOST_NBYTES:
                lengths = self._measure(self._first(member, _MOST_NBYTES))
                if lengths is not None:
                    self.lengths[cell] = lengths
        elif may_be_image(member.name.lower()):
            self.sizes[cell] = _array_size(self._first(member, _GLANCE_NBYTES), member.size)

    def _image_size(self, member: TarMember) -> tuple[int, int]:
        for nbytes in (_GLANCE_NBYTES, _MOST_NBYTES):
            try:
                header = images.probe(self._first(member, nbytes))
            except (SampleError, ValueError):
                if member.size <= nbytes:
                    break
            else:
                return header.width, header.height
        return 0, 0

    def _first(self, member: TarMember, nbytes: int) -> memoryview:
        return self._source.view(member.start, min(member.size, nbytes))


def may_be_image(name: str) -> bool:
    """True for names with the extension of an image or array."""
    return is_image(name) or extension(name) == "npy"


def _array_size(data: memoryview, nbytes: int) -> tuple[int, int]:
    try:
        shape = array_container.layout(data, nbytes).shape
    except ValueError:
        return 0, 0
    return (shape[1], shape[0]) if len(shape) == 3 and shape[2] == 3 else (0, 0)


_PLACES = 16


def fingerprint(source: TarSource, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> str:
    """Hex digest of 64 bits that identifies a tar.

    The digest is of the size of the tar, and of the header and last block of 16 members, including the last member. A
    copy has the same fingerprint, with any modification time. If two tars have the same size and the same names and
    sizes of members, their fingerprints differ if the last blocks of one of those 16 pairs of members differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    held = np.flatnonzero(starts)
    order = held[np.argsort(starts.reshape(-1)[held])]
    chosen = order[np.linspace(0, len(order) - 1, min(_PLACES, len(order))).astype(np.int64)]
    spans = []
    for start, size in zip(starts.reshape(-1)[chosen].tolist(), sizes.reshape(-1)[chosen].tolist(), strict=True):
        last = start + max(0, size - BLOCK)
        spans += [(start - BLOCK, start), (last, last + BLOCK)]
    # Not the version, because a copy of a tar has another version.
    digest.update(b"%d" % source.nbytes)
    for data in source.read_spans(spans):
        digest.update(data)
    return digest.hexdigest()


def measure_intervals(jpeg: memoryview) -> NDArray[np.uint16] | None:
    """Lengths of the intervals of a JPEG, or None without a grid.

    Reads the whole JPEG. Without native kernels the result is None.
    """
    native = kernels.native
    if native is None or not hasattr(native, "grid_measure"):
        return None
    lengths = native.grid_measure(jpeg)
    return None if lengths is None else np.frombuffer(lengths, np.uint16)


def checksum_of(source: TarSource) -> str:
    """BLAKE2b-256 of the whole tar, in hex."""
    digest, at = hashlib.blake2b(digest_size=32), 0
    while chunk := source.view(at, 1 << 22):
        digest.update(chunk)
        at += len(chunk)
    return digest.hexdigest()


Grids = Mapping[str, NDArray[np.uint16]]
"""Restart interval lengths of JPEGs, by member name."""


_MOST_FIELDS = 1024


@dataclass(slots=True)
class SampleTable:
    """Samples and fields of a tar, each in order of first appearance."""

    tar: str
    rows: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    cells: dict[Cell, TarMember] = field(default_factory=dict)
    latest: int = 0
    """Row of the latest member."""

    def add(self, member: TarMember) -> Cell | None:
        """Add a member and return its cell; None outside of samples.

        ShardError if the sample already has the field, or if there are too many fields.
        """
        place = split(member.name)
        if place is None:
            return None
        key, name = place
        row = self.latest = self.rows.setdefault(key, len(self.rows))
        column = self.columns.setdefault(name, len(self.columns))
        if len(self.columns) > _MOST_FIELDS:
            raise ShardError(
                f"{self.tar}: member {member.name!r} would be field {name!r} of sample {key!r}, but a tar has at most "
                f"{_MOST_FIELDS:,}. The key ends at the first dot of the base name. Rename the members before packing"
            )
        before = self.cells.setdefault((row, column), member)
        if before is not member:
            raise ShardError(
                f"{self.tar}: member {member.name!r} is a duplicate: field {name!r} of sample {key!r} is already "
                f"{before.name!r}. Re-create the tar without one of them"
            )
        return row, column

    def forget(self, name: str | None) -> None:
        """Remove samples that may be incomplete because member `name` is truncated.

        They begin with the sample of that member, or, if it is unknown, with that of the latest member.
        """
        place = None if name is None else split(name)
        first = self.latest if place is None else self.rows.get(place[0], len(self.rows))
        self.rows = {key: row for key, row in self.rows.items() if row < first}
        self.cells = {cell: member for cell, member in self.cells.items() if cell[0] < first}

    def array(self, attribute: str) -> NDArray[np.int64]:
        """`start` or `size` of each member, (samples, fields); 0 for absent fields."""
        array = np.zeros((len(self.rows), len(self.columns)), np.int64)
        if self.cells:
            rows, columns = zip(*self.cells, strict=True)
            array[rows, columns] = [getattr(member, attribute) for member in self.cells.values()]
        return array


def compute_index(
    source: TarSource,
    *,
    allow_truncated: bool = False,
    grids: Grids | None = None,
    measure: MeasureGrid | None = None,
    checksum: bool = False,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Compute metadata and arrays of the index of an open tar.

    Grid lengths come from `grids`, and from `measure` of each image. The tar is read once, with a few more blocks for
    its fingerprint, and once more for a checksum. ShardError for contents that a tar of samples must not have,
    StateError if the tar changes during the call.
    """
    walk, table, scanner = TarWalk(source), SampleTable(source.name), ImageSizeScanner(source, measure)
    for member in walk:
        cell = table.add(member)
        if cell is not None:
            scanner.add(cell, member)
    if walk.cut is not None:
        if not allow_truncated:
            raise walk.cut.error(source.name)
        table.forget(walk.cut_name)
    starts, sizes = table.array("start"), table.array("size")
    image_columns = [number for name, number in table.columns.items() if may_be_image(name)]
    metadata = {
        "samples": len(table.rows),
        "fields": list(table.columns),
        **version_metadata(source.version),
        "fingerprint": fingerprint(source, starts, sizes),
        "blake2b": checksum_of(source) if checksum else None,
        "cut": walk.cut,
        "images": image_columns,
    }
    arrays = {
        **_keys(table.rows),
        "blocks": array_container.narrow(starts // BLOCK),
        "sizes": array_container.narrow(sizes),
        "dims": array_container.narrow(_dimensions(table, image_columns, scanner)),
        **_grids(table, {**scanner.lengths, **_cells(table, grids or {})}),
    }
    source.check_unchanged()  # if the tar is still being written, the index would be of a part of the tar
    return metadata, arrays


def version_metadata(version: FileVersion) -> dict[str, Any]:
    """The version of a tar as index metadata."""
    return {"nbytes": version.nbytes, "version": version.tag}


def _keys(rows: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    encoded = [key.encode("utf-8", "surrogateescape") for key in rows]
    bounds = np.cumsum([0, *map(len, encoded)])
    return {"key_bounds": array_container.narrow(bounds), "key_bytes": np.frombuffer(b"".join(encoded), np.uint8)}


def _dimensions(table: SampleTable, image_columns: Sequence[int], scanner: ImageSizeScanner) -> NDArray[np.int64]:
    """Width and height of images, (samples, image fields, 2); 0 if unknown."""
    dims = np.zeros((len(table.rows), len(image_columns), 2), np.int64)
    place = {column: number for number, column in enumerate(image_columns)}
    for (row, column), size in scanner.sizes.items():
        if (row, column) in table.cells:
            dims[row, place[column]] = size
    return dims


def _cells(table: SampleTable, grids: Grids) -> dict[Cell, NDArray[np.uint16]]:
    """Grid lengths by cell; ArgumentError for an unknown member name."""
    found = {}
    for name, lengths in grids.items():
        key, ending = split(name) or ("", "")
        cell = table.rows.get(key, -1), table.columns.get(ending, -1)
        if cell not in table.cells:
            raise ArgumentError(f"grids= names {name!r}, which is not a member of a sample in {table.tar}")
        found[cell] = np.asarray(lengths, np.uint16)
    return found


def _grids(table: SampleTable, lengths: Mapping[Cell, NDArray[np.uint16]]) -> dict[str, NDArray[Any]]:
    """Concatenated grid lengths, and their bounds by cell in row order."""
    found = {cell: lengths[cell] for cell in sorted(lengths) if cell in table.cells}
    if not found:
        return {}
    counts = np.zeros((len(table.rows), len(table.columns)), np.int64)
    for cell, each in found.items():
        counts[cell] = len(each)
    bounds = np.concatenate(([0], np.cumsum(counts.reshape(-1))))
    return {"grid_bounds": array_container.narrow(bounds), "grids": np.concatenate(list(found.values()))}
