"""`Index`: where in a tar each field of each sample lies, read from the side-car without touching the tar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.datasets import array_container as files
from feedline.datasets.webdataset.build_index import fingerprint, hashed, stamp
from feedline.datasets.webdataset.sources import FileSource, TarSource
from feedline.datasets.webdataset.tar import BLOCK, Cut, ShardError
from feedline.errors import SampleError
from feedline.stores.base import FileVersion


@dataclass(frozen=True, slots=True)
class Head:
    """What the table of a side-car says of its tar; enough to count samples and to see whether it fits."""

    samples: int
    fields: tuple[str, ...]
    version: FileVersion
    fingerprint: str
    blake2b: str | None
    cut: Cut | None
    pictured: tuple[int, ...]

    @classmethod
    def of(cls, told: Mapping[str, Any], path: str) -> Head:
        """The head in a table; SampleError if the table is that of something else."""
        try:
            return cls(
                int(told["samples"]),
                tuple(map(str, told["fields"])),
                FileVersion(int(told["nbytes"]), str(told["version"])),
                str(told["fingerprint"]),
                told["blake2b"],
                None if told["cut"] is None else Cut(*told["cut"]),
                tuple(map(int, told["pictured"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SampleError(f"{path} is not the index of a tar ({error!r})") from error


class TarIndex:
    """Samples 0 … `len(index) - 1` of one tar, in the order in which their keys first appear in it.

    Arrays are read-only views of the side-car's mapping. Safe to use from several threads.
    """

    def __init__(
        self, tar: str, told: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], path: str | None = None
    ) -> None:
        self.tar = tar
        self.path = path
        """The side-car; None for an index in memory."""
        self.head = Head.of(told, f"the index of {tar}")
        _refuse_unfit(self.head, arrays, tar)
        self._told, self._arrays = told, arrays
        self._keys, self._key_bounds = arrays["key_bytes"], arrays["key_bounds"]
        self.blocks: NDArray[Any] = arrays["blocks"]
        """Where the data begin, in blocks of 512 bytes, (samples, fields); 0 where a sample lacks a field."""
        self.sizes: NDArray[Any] = arrays["sizes"]
        """Bytes of each member, (samples, fields)."""
        self._dims = arrays["dims"]
        self._grids, self._grid_bounds = arrays.get("grids"), arrays.get("grid_bounds")
        self._columns = {name: number for number, name in enumerate(self.head.fields)}

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of all samples, in the order in which they first appear."""
        return self.head.fields

    @property
    def has_grids(self) -> bool:
        """Whether the lengths of restart intervals are known."""
        return self._grids is not None

    def __len__(self) -> int:
        return self.head.samples

    @property
    def keys(self) -> Iterator[str]:
        """The keys, one after the other."""
        return (self.key(row) for row in range(len(self)))

    def key(self, row: int) -> str:
        """The key of a sample: its members' path up to the first dot of the base name."""
        start, stop = self._key_bounds[row : row + 2].tolist()
        return self._keys[start:stop].tobytes().decode("utf-8", "surrogateescape")

    def column(self, field: str) -> int | None:
        """The place of a field in `fields`, or None."""
        return self._columns.get(field)

    def present(self, row: int) -> list[str]:
        """The fields that a sample has."""
        return [name for name, block in zip(self.fields, self.blocks[row].tolist(), strict=True) if block]

    def counts(self) -> dict[str, int]:
        """How many samples have each field."""
        return dict(zip(self.fields, np.count_nonzero(self.blocks, axis=0).tolist(), strict=True))

    def member(self, row: int, column: int) -> str:
        """The name of a member; extensions are in lower case, whatever they are in the tar."""
        return f"{self.key(row)}.{self.fields[column]}"

    def start(self, row: int, column: int) -> int:
        """Where in the tar the data of a member begin; 0 if the sample lacks the field."""
        return int(self.blocks[row, column]) * BLOCK

    def dimensions(self, field: str) -> NDArray[Any] | None:
        """Width and height of the pictures of a field, (samples, 2); 0 where one could not be told. None: no pictures.

        As the header tells them, before any EXIF orientation.
        """
        column = self.column(field)
        return self._dims[:, self.head.pictured.index(column)] if column in self.head.pictured else None

    def grid(self, row: int, column: int) -> NDArray[np.uint16] | None:
        """The lengths of a JPEG's restart intervals, or None."""
        if self._grids is None or self._grid_bounds is None:
            return None
        cell = row * len(self.fields) + column
        start, stop = self._grid_bounds[cell : cell + 2].tolist()
        return self._grids[start:stop] if stop > start else None

    def fits(self, source: TarSource) -> bool:
        """Whether this is the index of the tar as it is now.

        It is if the tar has the size and the time of modification that it had, or as an object the version; and, for
        copies, if it has the size, and the headers and last bytes of sixteen members are the same (see `fingerprint`).
        """
        was, now = self.head.version, source.version
        return now.matches(was) or (now.nbytes == was.nbytes and self._alike(source))

    def _alike(self, source: TarSource) -> bool:
        starts = self.blocks.astype(np.int64) * BLOCK
        with source:
            return fingerprint(source, starts, self.sizes.astype(np.int64)) == self.head.fingerprint

    def written(self, version: FileVersion) -> list[bytes | memoryview]:
        """The bytes of its side-car, in pieces, for a tar of which this is now known to be the index."""
        return files.packed({**self._told, **stamp(version)}, self._arrays)

    def verify(self, source: TarSource | None = None) -> None:
        """Read the whole tar and compare its checksum; ShardError if it differs, or if none was stored."""
        if self.head.blake2b is None:
            raise ShardError(f"the index of {self.tar} holds no checksum; write it with checksum=True")
        with source or FileSource(self.tar) as opened:
            found = hashed(opened)
        if found != self.head.blake2b:
            raise ShardError(
                f"{self.tar} is not what was indexed: its checksum is {found}, that of its index {self.head.blake2b}. "
                f"Copy the tar again"
            )

    def __repr__(self) -> str:
        return f"<Index of {self.tar}: {len(self)} samples, fields {', '.join(self.fields) or 'none'}>"


def unfit(source: TarSource, index: str) -> ShardError:
    """What to raise when an index that was asked for does not fit."""
    return ShardError(
        f"the index {index} does not fit its tar {source.name} ({source.version.nbytes:,} bytes): the tar was written "
        f"again since, or the index is another's. Delete the index to have it made anew"
    )


def _refuse_unfit(head: Head, arrays: Mapping[str, NDArray[Any]], tar: str) -> None:
    """Shapes that belong together, so that whoever asks for a row of `len` gets one."""
    rows, columns = head.samples, len(head.fields)
    ends = {name: int(arrays[name][-1]) for name in ("key_bounds", "grid_bounds") if arrays.get(name, _NONE).size}
    wanted: dict[str, tuple[int, ...]] = {
        "key_bounds": (rows + 1,),
        "key_bytes": (ends.get("key_bounds", 0),),
        "blocks": (rows, columns),
        "sizes": (rows, columns),
        "dims": (rows, len(head.pictured), 2),
    }
    if "grids" in arrays or "grid_bounds" in arrays:
        wanted |= {"grid_bounds": (rows * columns + 1,), "grids": (ends.get("grid_bounds", 0),)}
    for name, shape in wanted.items():
        found = arrays.get(name, _NONE)
        if found.shape != shape or found.dtype.kind != "u":
            raise SampleError(
                f"the index of {tar} is damaged: {name} is {found.dtype} of shape {found.shape}, not of {shape}"
            )
    if not set(head.pictured) <= set(range(columns)):
        raise SampleError(f"the index of {tar} is damaged: it has {columns} fields, and pictures in {head.pictured}")


_NONE: NDArray[Any] = np.empty(0, np.int64)
