"""`TarIndex`: byte ranges of the samples and fields of a tar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.indexes import IndexFile
from feedline.datasets.webdataset.build_index import checksum_of, fingerprint, version_metadata
from feedline.datasets.webdataset.sources import TarSource
from feedline.datasets.webdataset.tar import BLOCK, Cut, ShardError
from feedline.errors import SampleError
from feedline.stores.base import FileVersion


@dataclass(frozen=True, slots=True)
class Head:
    """Metadata of an index: sample count, fields and version of the tar."""

    samples: int
    fields: tuple[str, ...]
    version: FileVersion
    fingerprint: str
    blake2b: str | None
    cut: Cut | None
    image_columns: tuple[int, ...]

    @classmethod
    def of(cls, metadata: Mapping[str, Any], path: str) -> Head:
        """Parse index metadata; SampleError for other metadata."""
        try:
            return cls(
                int(metadata["samples"]),
                tuple(map(str, metadata["fields"])),
                FileVersion(int(metadata["nbytes"]), str(metadata["version"])),
                str(metadata["fingerprint"]),
                metadata["blake2b"],
                None if metadata["cut"] is None else Cut(*metadata["cut"]),
                tuple(map(int, metadata["images"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SampleError(f"{path} is not the index of a tar ({error!r})") from error


class TarIndex:
    """Members of the samples of one tar, by row and field.

    Rows keep the order in which keys first appear. Arrays are read-only views of the index file's mapping.
    Thread-safe.
    """

    def __init__(
        self, tar: str, metadata: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], path: str | None = None
    ) -> None:
        self.tar = tar
        self.path = path
        """The index file; None for an index in memory."""
        self.head = Head.of(metadata, f"the index of {tar}")
        _check_shapes(self.head, arrays, tar)
        self._metadata, self._arrays = metadata, arrays
        self._keys, self._key_bounds = arrays["key_bytes"], arrays["key_bounds"]
        self.blocks: NDArray[Any] = arrays["blocks"]
        """First block of each member's data, (samples, fields), in blocks of 512 bytes; 0 for absent fields."""
        self.sizes: NDArray[Any] = arrays["sizes"]
        """Bytes of each member, (samples, fields)."""
        self._dims = arrays["dims"]
        self._grids, self._grid_bounds = arrays.get("grids"), arrays.get("grid_bounds")
        self._columns = {name: number for number, name in enumerate(self.head.fields)}

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of all samples, in order of first appearance."""
        return self.head.fields

    @property
    def has_grids(self) -> bool:
        """True if restart interval lengths are known."""
        return self._grids is not None

    def __len__(self) -> int:
        return self.head.samples

    @property
    def keys(self) -> Iterator[str]:
        """Iterator over all keys."""
        return (self.key(row) for row in range(len(self)))

    def key(self, row: int) -> str:
        """Key of a sample: path up to the base name's first dot."""
        start, stop = self._key_bounds[row : row + 2].tolist()
        return self._keys[start:stop].tobytes().decode("utf-8", "surrogateescape")

    def column(self, field: str) -> int | None:
        """The column of a field, or None."""
        return self._columns.get(field)

    def present(self, row: int) -> list[str]:
        """The fields that a sample has."""
        return [name for name, block in zip(self.fields, self.blocks[row].tolist(), strict=True) if block]

    def counts(self) -> dict[str, int]:
        """Number of samples that have each field."""
        return dict(zip(self.fields, np.count_nonzero(self.blocks, axis=0).tolist(), strict=True))

    def member(self, row: int, column: int) -> str:
        """The name of a member, with its extension in lower case."""
        return f"{self.key(row)}.{self.fields[column]}"

    def start(self, row: int, column: int) -> int:
        """Offset of a member's data in the tar; 0 if absent."""
        return int(self.blocks[row, column]) * BLOCK

    def dimensions(self, field: str) -> NDArray[Any] | None:
        """Width and height of a field's images, (samples, 2); None without images.

        They come from the headers, before any EXIF orientation; 0 if a header was unreadable.
        """
        column = self.column(field)
        return self._dims[:, self.head.image_columns.index(column)] if column in self.head.image_columns else None

    def grid(self, row: int, column: int) -> NDArray[np.uint16] | None:
        """Restart interval lengths of a JPEG, or None."""
        if self._grids is None or self._grid_bounds is None:
            return None
        cell = row * len(self.fields) + column
        start, stop = self._grid_bounds[cell : cell + 2].tolist()
        return self._grids[start:stop] if stop > start else None

    def fits(self, source: TarSource) -> bool:
        """True if the index matches the current state of the tar.

        Size and modification time of a file, or the version of an object, must be equal. For copies, size and
        `fingerprint` must be equal.
        """
        was, now = self.head.version, source.version
        return now.matches(was) or (now.nbytes == was.nbytes and self._has_same_fingerprint(source))

    def _has_same_fingerprint(self, source: TarSource) -> bool:
        starts = self.blocks.astype(np.int64) * BLOCK
        with source:
            return fingerprint(source, starts, self.sizes.astype(np.int64)) == self.head.fingerprint

    def write(self, path: str, version: FileVersion) -> None:
        """Write the index, for a tar of this version."""
        IndexFile(path, {**self._metadata, **version_metadata(version)}).save(self._arrays)

    def verify(self, source: TarSource | None = None) -> None:
        """Read the whole tar and compare its checksum.

        ShardError if it differs, or if the index has no checksum.
        """
        if self.head.blake2b is None:
            raise ShardError(f"the index of {self.tar} has no checksum; write it with checksum=True")
        with source or TarSource.at(self.tar) as opened:
            checksum = checksum_of(opened)
        if checksum != self.head.blake2b:
            raise ShardError(
                f"{self.tar} is not the indexed tar: its checksum is {checksum}, but {self.head.blake2b} in the index. "
                f"Copy the tar again"
            )

    def __repr__(self) -> str:
        return f"<TarIndex of {self.tar}: {len(self)} samples, fields {', '.join(self.fields) or 'none'}>"


def mismatch_error(source: TarSource, index: str) -> ShardError:
    """The error for an explicitly given index that does not match."""
    return ShardError(
        f"the index {index} does not match its tar {source.name} ({source.version.nbytes:,} bytes): the tar was "
        f"rewritten, or the index belongs to another tar. Delete the index to have it built again"
    )


def _check_shapes(head: Head, arrays: Mapping[str, NDArray[Any]], tar: str) -> None:
    """Raise SampleError unless the array shapes are consistent with the head."""
    rows, columns = head.samples, len(head.fields)
    ends = {name: int(arrays[name][-1]) for name in ("key_bounds", "grid_bounds") if arrays.get(name, _NONE).size}
    wanted: dict[str, tuple[int, ...]] = {
        "key_bounds": (rows + 1,),
        "key_bytes": (ends.get("key_bounds", 0),),
        "blocks": (rows, columns),
        "sizes": (rows, columns),
        "dims": (rows, len(head.image_columns), 2),
    }
    if "grids" in arrays or "grid_bounds" in arrays:
        wanted |= {"grid_bounds": (rows * columns + 1,), "grids": (ends.get("grid_bounds", 0),)}
    for name, shape in wanted.items():
        found = arrays.get(name, _NONE)
        if found.shape != shape or found.dtype.kind != "u":
            raise SampleError(
                f"the index of {tar} is damaged: {name} is {found.dtype} of shape {found.shape} instead of {shape}"
            )
    if not set(head.image_columns) <= set(range(columns)):
        raise SampleError(
            f"the index of {tar} is damaged: it has {columns} fields, but images in fields {head.image_columns}"
        )


_NONE: NDArray[Any] = np.empty(0, np.int64)
