"""From the members of a tar to the arrays of its index: which bytes are which field of which sample.

What is seen of members while a tar is indexed: the sizes of pictures, and the lengths of the grids in them.

Which tar an index belongs to, where size and time do not tell: a glance at what is in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline import images
from feedline.datasets import array_container
from feedline.datasets.array_container import narrowed
from feedline.datasets.webdataset import tar as names
from feedline.datasets.webdataset.sources import TarSource
from feedline.datasets.webdataset.tar import BLOCK, ShardError, TarMember, TarWalk
from feedline.errors import ArgumentError, SampleError
from feedline.stores.base import FileVersion

Measure = Callable[[memoryview], NDArray[np.uint16] | None]
"""From an encoded picture to the lengths of its restart intervals; None for one without a grid."""


Cell = tuple[int, int]
"""The row of a sample and the column of a field."""


_GLANCE_NBYTES = 64 << 10
"""Nearly every header lies in the first bytes, and an object need not give more."""


_MOST_NBYTES = 64 << 20
"""No more of a picture is held in memory, whatever size a header claims."""


class ImageSizeScanner:
    """Looks at the pictures among members as they come by; what cannot be read is told when its sample is."""

    def __init__(self, source: TarSource, measure: Measure | None) -> None:
        self._source = source
        self._measure = measure
        self.sizes: dict[Cell, tuple[int, int]] = {}
        """Width and height of pictures, and of arrays that may be pictures."""
        self.lengths: dict[Cell, NDArray[np.uint16]] = {}
        """Those of the intervals of JPEGs with a grid."""

    def add(self, cell: Cell, member: TarMember) -> None:
        """Look at a member if it may be a picture."""
        if names.is_image(member.name.lower()):
            self.sizes[cell] = self._picture(member)
            if self._measure is not None and member.size <= _MOST_NBYTES:
                lengths = self._measure(self._first(member, _MOST_NBYTES))
                if lengths is not None:
                    self.lengths[cell] = lengths
        elif may_be_picture(member.name.lower()):
            self.sizes[cell] = _array(self._first(member, _GLANCE_NBYTES), member.size)

    def _picture(self, member: TarMember) -> tuple[int, int]:
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


def may_be_picture(name: str) -> bool:
    """Whether a field or member of this name may be a picture: one of its formats, or an array."""
    return names.is_image(name) or names.extension(name) == "npy"


def _array(data: memoryview, nbytes: int) -> tuple[int, int]:
    try:
        shape = array_container.layout(data, nbytes).shape
    except ValueError:
        return 0, 0
    return (shape[1], shape[0]) if len(shape) == 3 and shape[2] == 3 else (0, 0)


_PLACES = 16


def fingerprint(source: TarSource, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> str:
    """64 bits in hex, of the tar's size and of the headers and last bytes of 16 members, the last one among them.

    A copy on another machine, or in a store, has the same, whatever its times. Two tars of one size, whose members have
    the same names and sizes, differ in it if one of those 16 pairs of members ends differently.
    """
    digest = hashlib.blake2b(digest_size=8)
    held = np.flatnonzero(starts)
    order = held[np.argsort(starts.reshape(-1)[held])]
    chosen = order[np.linspace(0, len(order) - 1, min(_PLACES, len(order))).astype(np.int64)]
    spans = []
    for start, size in zip(starts.reshape(-1)[chosen].tolist(), sizes.reshape(-1)[chosen].tolist(), strict=True):
        last = start + max(0, size - BLOCK)
        spans += [(start - BLOCK, start), (last, last + BLOCK)]
    digest.update(b"%d" % source.nbytes)
    for data in source.looks(spans):
        digest.update(data)
    return digest.hexdigest()


def hashed(source: TarSource) -> str:
    """The checksum of all bytes: BLAKE2b of 256 bits, in hex."""
    digest, at = hashlib.blake2b(digest_size=32), 0
    while chunk := source.read(at, 1 << 22):
        digest.update(chunk)
        at += len(chunk)
    return digest.hexdigest()


Grids = Mapping[str, NDArray[np.uint16]]
"""For members by name, the lengths of the restart intervals of a JPEG."""


_MOST_FIELDS = 1024


@dataclass(slots=True)
class SampleTable:
    """Samples in the order in which their keys first appear; fields in the order in which theirs do."""

    tar: str
    rows: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    cells: dict[Cell, TarMember] = field(default_factory=dict)

    def add(self, member: TarMember) -> Cell | None:
        """File a member; None for one that is no part of a sample, ShardError for one that is there already."""
        place = names.split(member.name)
        if place is None:
            return None
        key, name = place
        row = self.rows.setdefault(key, len(self.rows))
        column = self.columns.setdefault(name, len(self.columns))
        if len(self.columns) > _MOST_FIELDS:
            raise ShardError(
                f"{self.tar}: member {member.name!r} would be field {name!r} of sample {key!r}, one of more than "
                f"{_MOST_FIELDS:,}: the key ends at the first dot of the base name. Rename the members before packing"
            )
        before = self.cells.setdefault((row, column), member)
        if before is not member:
            raise ShardError(
                f"{self.tar}: member {member.name!r} comes twice: field {name!r} of sample {key!r} is already "
                f"{before.name!r}. Make the tar anew without one of them"
            )
        return row, column

    def forget(self, name: str) -> None:
        """Leave out the sample to which the member `name` belongs, if it has begun: a half sample is none."""
        key, _ = names.split(name) or ("", "")
        last = len(self.rows) - 1
        if self.rows.get(key) == last:
            del self.rows[key]
            self.cells = {place: member for place, member in self.cells.items() if place[0] != last}

    def array(self, attribute: str) -> NDArray[np.int64]:
        """`start` or `size` of each member, (samples, fields); 0 where a sample lacks a field."""
        array = np.zeros((len(self.rows), len(self.columns)), np.int64)
        if self.cells:
            rows, columns = zip(*self.cells, strict=True)
            array[rows, columns] = [getattr(member, attribute) for member in self.cells.values()]
        return array


def built(
    source: TarSource,
    *,
    allow_truncated: bool = False,
    grids: Grids | None = None,
    measure: Measure | None = None,
    checksum: bool = False,
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What an index tells of a tar, and its arrays; ShardError for what a tar of samples must not hold.

    The lengths of grids are those in `grids`, and what `measure` finds in pictures. `source` is open; it is read once,
    but for a glance at the end, and once more for a checksum.
    """
    version = source.version
    walk, table, looks = TarWalk(source), SampleTable(source.name), ImageSizeScanner(source, measure)
    for member in walk:
        cell = table.add(member)
        if cell is not None:
            looks.add(cell, member)
    if walk.cut is not None:
        if not allow_truncated:
            raise walk.cut.error(source.name)
        table.forget(walk.cut.name)
    starts, sizes = table.array("start"), table.array("size")
    pictured = [number for name, number in table.columns.items() if may_be_picture(name)]
    told = {
        "samples": len(table.rows),
        "fields": list(table.columns),
        **stamp(version),
        "fingerprint": fingerprint(source, starts, sizes),
        "blake2b": hashed(source) if checksum else None,
        "cut": walk.cut,
        "pictured": pictured,
    }
    arrays = {
        **_keys(table.rows),
        "blocks": narrowed(starts // BLOCK),
        "sizes": narrowed(sizes),
        "dims": narrowed(_dimensions(table, pictured, looks)),
        **_grids(table, {**looks.lengths, **_cells(table, grids or {})}),
    }
    if source.version != version:
        raise ShardError(f"{source.name} changed while it was indexed. Wait until its writer is done")
    return told, arrays


def stamp(version: FileVersion) -> dict[str, Any]:
    """What an index tells of the state of its tar."""
    return {"nbytes": version.nbytes, "version": version.tag}


def _keys(rows: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    encoded = [key.encode("utf-8", "surrogateescape") for key in rows]
    bounds = np.cumsum([0, *map(len, encoded)])
    return {"key_bounds": narrowed(bounds), "key_bytes": np.frombuffer(b"".join(encoded), np.uint8)}


def _dimensions(table: SampleTable, pictured: Sequence[int], looks: ImageSizeScanner) -> NDArray[np.int64]:
    """(samples, picture fields, 2): width and height of each picture; 0 for what is none, or no readable one."""
    dims = np.zeros((len(table.rows), len(pictured), 2), np.int64)
    place = {column: number for number, column in enumerate(pictured)}
    for (row, column), size in looks.sizes.items():
        if (row, column) in table.cells:
            dims[row, place[column]] = size
    return dims


def _cells(table: SampleTable, grids: Grids) -> dict[Cell, NDArray[np.uint16]]:
    """The lengths by the cells of the members that are named; ArgumentError for a name that is none."""
    found = {}
    for name, lengths in grids.items():
        key, ending = names.split(name) or ("", "")
        cell = table.rows.get(key, -1), table.columns.get(ending, -1)
        if cell not in table.cells:
            raise ArgumentError(f"grids= names {name!r}, which is no member of a sample in {table.tar}")
        found[cell] = np.asarray(lengths, np.uint16)
    return found


def _grids(table: SampleTable, lengths: Mapping[Cell, NDArray[np.uint16]]) -> dict[str, NDArray[Any]]:
    """The lengths of all grids end to end, and where those of each cell (row by row) begin."""
    found = {cell: lengths[cell] for cell in sorted(lengths) if cell in table.cells}
    if not found:
        return {}
    counts = np.zeros((len(table.rows), len(table.columns)), np.int64)
    for cell, each in found.items():
        counts[cell] = len(each)
    bounds = np.concatenate(([0], np.cumsum(counts.reshape(-1))))
    return {"grid_bounds": narrowed(bounds), "grids": np.concatenate(list(found.values()))}
