"""`PackedStrings` and `PackedBytes`: many strings in two arrays.

Millions of Python objects would cost more memory, and be copied by every worker process.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from feedline.core.dataset import READS_SAMPLES
from feedline.core.paths import replacing
from feedline.core.tensors import normalize_index
from feedline.errors import SampleError, StateError
from feedline.stores.base import FileVersion, changed_error

_MAGIC = b"feedline strings 1\n"


_HEADER_NBYTES = 64


_BLOCK = 4096


# os.fsdecode returns lone surrogates for undecodable bytes of a file name. Encoding must restore those bytes.
_ERRORS = "surrogatepass"


class PackedStrings(Sequence[str]):
    """The `strings` of an iterable, as an immutable sequence in one buffer.

    Each string takes 8 bytes plus its UTF-8. A list takes about 57 bytes more for each, and its reference counts make
    every worker process copy it page by page. Pickles as two arrays, out of band where the pickler supports it; if
    opened from a file, as its path and version: StateError if the file has changed since then.
    """

    traits = READS_SAMPLES

    def __init__(self, strings: Iterable[str] = ()) -> None:
        offsets, buffer, position = array("q", [0]), bytearray(), 0
        strings = iter(strings)
        while block := [text.encode("utf-8", _ERRORS) for text in islice(strings, _BLOCK)]:
            for encoded in block:
                position += len(encoded)
                offsets.append(position)
            buffer += b"".join(block)
        self._path: str | None = None
        self._version: FileVersion | None = None
        # Only arrays that own their memory can share its pages with worker processes.
        self._offsets = np.array(offsets, np.int64)
        self._buffer = np.array(buffer, np.uint8)

    @classmethod
    def from_lines(cls, path: str | os.PathLike[str]) -> Self:
        """Read the lines of a UTF-8 text file as `Lines` does."""
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            return cls(line.removesuffix("\n").removesuffix("\r") for line in file)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Memory-map a file written by `save`, without reading the strings."""
        self = cls.__new__(cls)
        self._path = str(Path(path).resolve())
        self._version = self._map()
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file for `open`, atomically."""
        with replacing(path) as file:
            file.write((_MAGIC + b"%d %d" % (len(self), len(self._buffer))).ljust(_HEADER_NBYTES, b"\n"))
            file.write(self._offsets.data)
            file.write(self._buffer.data)

    @property
    def nbytes(self) -> int:
        """Size of the memory or mapping."""
        return int(self._offsets.nbytes + self._buffer.nbytes)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = normalize_index(index, len(self), "PackedStrings")
        start, stop = self._offsets[at : at + 2].tolist()
        return self._buffer[start:stop].tobytes().decode("utf-8", _ERRORS)

    def __getitems__(self, indices: Sequence[int]) -> list[str]:
        """The strings of these indices."""
        return [self[index] for index in indices]

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _BLOCK):
            offsets = self._offsets[first : first + _BLOCK + 1].tolist()
            block = self._buffer[offsets[0] : offsets[-1]].tobytes()
            for start, stop in pairwise(offsets):
                yield block[start - offsets[0] : stop - offsets[0]].decode("utf-8", _ERRORS)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedStrings):
            return NotImplemented
        return np.array_equal(self._offsets, other._offsets) and np.array_equal(self._buffer, other._buffer)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<PackedStrings: {len(self)} strings, {self.nbytes} bytes>"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ if self._path is None else {"_path": self._path, "_version": self._version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._path is not None and self._map() != self._version:
            raise changed_error(
                StateError, self._path, "it was saved again", since="it was opened", remedy="open it again"
            )

    def _map(self) -> FileVersion:
        """Map the file, and return its version."""
        assert self._path is not None
        with open(self._path, "rb") as file:
            header, version = file.read(_HEADER_NBYTES), FileVersion.of(os.fstat(file.fileno()))
            if not header.startswith(_MAGIC) or len(header) < _HEADER_NBYTES:
                raise SampleError(f"{self._path} is not a file of PackedStrings.save; write it with that method")
            count, nbytes = map(int, header[len(_MAGIC) :].split())
            wanted = _HEADER_NBYTES + 8 * (count + 1) + nbytes
            if version.nbytes != wanted:
                raise SampleError(
                    f"{self._path} is damaged: the file has {version.nbytes} bytes, its header describes {wanted}"
                )
            mapped: NDArray[np.uint8] = np.memmap(file, np.uint8, "r", _HEADER_NBYTES).view(np.ndarray)
        self._offsets = mapped[: 8 * (count + 1)].view(np.int64)
        self._buffer = mapped[8 * (count + 1) :]
        return version


class PackedBytes:
    """An immutable sequence of bytes in one buffer.

    Each string takes 8 bytes for its offset plus its own bytes. Pickles as arrays, out of band where the pickler
    supports it.
    """

    def __init__(self, offsets: NDArray[np.int64], buffer: NDArray[np.uint8]) -> None:
        self.offsets, self.buffer = offsets, buffer
        lengths = np.diff(offsets)
        width = int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0
        self._fixed: NDArray[Any] | None = buffer.view(f"V{width}") if width else None

    def __reduce__(self) -> tuple[type[PackedBytes], tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        return PackedBytes, (self.offsets, self.buffer)  # without the view, which would become a copy

    @classmethod
    def of(cls, strings: Iterable[bytes]) -> PackedBytes:
        """Pack strings in order."""
        offsets, buffer = array("q", [0]), bytearray()
        for text in strings:
            buffer += text
            offsets.append(len(buffer))
        return cls(np.frombuffer(offsets, np.int64), np.frombuffer(buffer, np.uint8))

    @property
    def nbytes(self) -> int:
        """Size of the memory or mapping."""
        return int(self.offsets.nbytes + self.buffer.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, at: int) -> bytes:
        """The string at a checked index."""
        start, stop = self.offsets[at : at + 2].tolist()
        return bytes(self.buffer.data[start:stop])

    def many(self, places: NDArray[np.int64]) -> list[bytes]:
        """The strings at checked indices."""
        if self._fixed is not None:
            found: list[bytes] = self._fixed[places].tolist()
            return found
        buffer = self.buffer.data
        spans = zip(self.offsets[places].tolist(), self.offsets[places + 1].tolist(), strict=True)
        return [bytes(buffer[start:stop]) for start, stop in spans]
