"""From the members of a tar to the arrays of its index: which bytes are which field of which sample."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline import images
from feedline.errors import ArgumentError, SampleError
from feedline.shards import names, npy
from feedline.shards.arrays import narrowed
from feedline.shards.fingerprints import fingerprint, version_of
from feedline.shards.tar import BLOCK, Member, ShardError, Walk

Grids = Mapping[str, NDArray[np.uint16]]
"""For members by name, the lengths of the restart intervals of a JPEG."""

_MOST_FIELDS = 1024


@dataclass(slots=True)
class Table:
    """Samples in the order in which their keys first appear; fields in the order in which theirs do."""

    tar: str
    rows: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    cells: dict[tuple[int, int], Member] = field(default_factory=dict)

    def add(self, member: Member) -> None:
        """File a member; one that is no part of a sample is left out, one that is there already is an error."""
        place = names.split(member.name)
        if place is None:
            return
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
    tar: str, *, allow_truncated: bool = False, grids: Grids | None = None, checksum: bool = False
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What an index tells of a tar, and its arrays; ShardError for what a tar of samples must not hold."""
    version = version_of(tar)
    walk, table = Walk(tar), Table(tar)
    for member in walk:
        table.add(member)
    if walk.cut is not None:
        if not allow_truncated:
            raise walk.cut.error(tar)
        table.forget(walk.cut.name)
    starts, sizes = table.array("start"), table.array("size")
    pictured = [number for name, number in table.columns.items() if _may_be_picture(name)]
    told = {
        "samples": len(table.rows),
        "fields": list(table.columns),
        "nbytes": version.nbytes,
        "modified_ns": version.modified_ns,
        "fingerprint": fingerprint(tar, starts, sizes),
        "blake2b": hashed(tar) if checksum else None,
        "cut": walk.cut,
        "pictured": pictured,
    }
    arrays = {
        **_keys(table.rows),
        "blocks": narrowed(starts // BLOCK),
        "sizes": narrowed(sizes),
        "dims": narrowed(_dimensions(tar, table, pictured)),
        **_grids(table, grids or {}),
    }
    if version_of(tar) != version:
        raise ShardError(f"{tar} changed while it was indexed. Wait until its writer is done")
    return told, arrays


def hashed(tar: str) -> str:
    """The checksum of all bytes: BLAKE2b of 256 bits, in hex."""
    digest = hashlib.blake2b(digest_size=32)
    with open(tar, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _may_be_picture(name: str) -> bool:
    return names.is_image(name) or names.extension(name) == "npy"


def _keys(rows: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    encoded = [key.encode("utf-8", "surrogateescape") for key in rows]
    bounds = np.cumsum([0, *map(len, encoded)])
    return {"key_bounds": narrowed(bounds), "key_bytes": np.frombuffer(b"".join(encoded), np.uint8)}


def _dimensions(tar: str, table: Table, pictured: Sequence[int]) -> NDArray[np.int64]:
    """(samples, picture fields, 2): width and height of each picture; 0 for what is none, or no readable one."""
    dims = np.zeros((len(table.rows), len(pictured), 2), np.int64)
    if not pictured or not table.cells:
        return dims
    place = {column: number for number, column in enumerate(pictured)}
    is_image = [names.is_image(name) for name in table.columns]
    with _mapped(tar) as memory:
        for (row, column), member in table.cells.items():
            if column in place:
                with memory[member.start : member.start + member.size] as data:
                    dims[row, place[column]] = _size_of(data, is_image[column])
    return dims


def _size_of(data: memoryview, is_image: bool) -> tuple[int, int]:
    try:
        if is_image:
            header = images.probe(data)
            return header.width, header.height
        shape = npy.layout(data).shape
    except (SampleError, ValueError):  # said when the sample is read, where `on_error` can decide
        return 0, 0
    return (shape[1], shape[0]) if len(shape) == 3 and shape[2] == 3 else (0, 0)


@contextmanager
def _mapped(path: str) -> Iterator[memoryview]:
    """The bytes of a file, within the block."""
    with (
        open(path, "rb", buffering=0) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
        memoryview(mapping) as view,
    ):
        yield view


def _grids(table: Table, grids: Grids) -> dict[str, NDArray[Any]]:
    """The lengths of all grids end to end, and where those of each cell (row by row) begin."""
    if not grids:
        return {}
    given = {names.split(member): lengths for member, lengths in grids.items()}
    found: dict[tuple[int, int], NDArray[np.uint16]] = {}
    for name in grids:
        key, ending = names.split(name) or ("", "")
        place = table.rows.get(key, -1), table.columns.get(ending, -1)
        if place not in table.cells:
            raise ArgumentError(f"grids= names {name!r}, which is no member of a sample in {table.tar}")
        found[place] = np.asarray(given[key, ending], np.uint16)
    counts = np.zeros((len(table.rows), len(table.columns)), np.int64)
    for place, lengths in found.items():
        counts[place] = len(lengths)
    bounds = np.concatenate(([0], np.cumsum(counts.reshape(-1))))
    return {"grid_bounds": narrowed(bounds), "grids": np.concatenate([found[place] for place in sorted(found)])}
