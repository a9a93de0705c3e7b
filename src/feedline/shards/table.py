"""From the members of a tar to the arrays of its index: which bytes are which field of which sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.errors import ArgumentError
from feedline.shards import names
from feedline.shards.arrays import narrowed
from feedline.shards.fingerprints import fingerprint, hashed
from feedline.shards.looks import Cell, Looks, Measure, may_be_picture
from feedline.shards.reading import Source, Version
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
    cells: dict[Cell, Member] = field(default_factory=dict)

    def add(self, member: Member) -> Cell | None:
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
    source: Source,
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
    walk, table, looks = Walk(source), Table(source.name), Looks(source, measure)
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


def stamp(version: Version) -> dict[str, Any]:
    """What an index tells of the state of its tar."""
    return {"nbytes": version.nbytes, "modified_ns": version.modified_ns, "version": version.told}


def _keys(rows: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    encoded = [key.encode("utf-8", "surrogateescape") for key in rows]
    bounds = np.cumsum([0, *map(len, encoded)])
    return {"key_bounds": narrowed(bounds), "key_bytes": np.frombuffer(b"".join(encoded), np.uint8)}


def _dimensions(table: Table, pictured: Sequence[int], looks: Looks) -> NDArray[np.int64]:
    """(samples, picture fields, 2): width and height of each picture; 0 for what is none, or no readable one."""
    dims = np.zeros((len(table.rows), len(pictured), 2), np.int64)
    place = {column: number for number, column in enumerate(pictured)}
    for (row, column), size in looks.sizes.items():
        if (row, column) in table.cells:
            dims[row, place[column]] = size
    return dims


def _cells(table: Table, grids: Grids) -> dict[Cell, NDArray[np.uint16]]:
    """The lengths by the cells of the members that are named; ArgumentError for a name that is none."""
    found = {}
    for name, lengths in grids.items():
        key, ending = names.split(name) or ("", "")
        cell = table.rows.get(key, -1), table.columns.get(ending, -1)
        if cell not in table.cells:
            raise ArgumentError(f"grids= names {name!r}, which is no member of a sample in {table.tar}")
        found[cell] = np.asarray(lengths, np.uint16)
    return found


def _grids(table: Table, lengths: Mapping[Cell, NDArray[np.uint16]]) -> dict[str, NDArray[Any]]:
    """The lengths of all grids end to end, and where those of each cell (row by row) begin."""
    found = {cell: lengths[cell] for cell in sorted(lengths) if cell in table.cells}
    if not found:
        return {}
    counts = np.zeros((len(table.rows), len(table.columns)), np.int64)
    for cell, each in found.items():
        counts[cell] = len(each)
    bounds = np.concatenate(([0], np.cumsum(counts.reshape(-1))))
    return {"grid_bounds": narrowed(bounds), "grids": np.concatenate(list(found.values()))}
