"""The samples in a chunk file of LitData, in each of the ways that it writes them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline import extras
from feedline.datasets.inflating import inflated
from feedline.datasets.once import OnceCache
from feedline.errors import SampleError

_ZSTD = b"\x28\xb5\x2f\xfd"
_FRAMED, _ARROW = b"LDFZ01\0\0", b"LDARW01\0"
_HEAD = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("at", "<u8"), ("nbytes", "<u4"), ("whole", "<u4")])
_MOST_NBYTES = 1 << 30
"""One sample, or one frame of samples, that claims to be larger is refused."""


class Items(Protocol):
    """A chunk: the bytes of a sample, or, in Arrow's form, the sample itself."""

    def item(self, at: int) -> Any: ...


class RawItems:
    """Samples one after the other, each within the offsets that come first."""

    def __init__(self, data: NDArray[np.uint8], count: int, path: Path, inflates: bool = False) -> None:
        self._data, self._path, self._inflates = data.data, path, inflates
        self._offsets = offsets_of(data, count, path)

    def item(self, at: int) -> memoryview:
        """The bytes of a sample."""
        piece = self._data[self._offsets[at] : self._offsets[at + 1]]
        if not self._inflates:
            return piece
        where = f"sample {at} of {self._path}"
        return inflated(np.frombuffer(piece, np.uint8), "zstd", _content_nbytes(piece, where), where, "litdata").data


class FramedItems:
    """Samples compressed some at a time; the frames that were used last are kept."""

    def __init__(self, data: NDArray[np.uint8], count: int, path: Path, frames: Cache) -> None:
        self._data, self._path, self._cache = data, path, frames
        try:
            _, version, _, items, self._rows, total = _HEAD.unpack_from(data.data)
            table = _HEAD.size + 4 * (items + 1)
            self._offsets = np.frombuffer(data.data, "<u4", items + 1, _HEAD.size)
            self._frames = np.frombuffer(data.data, _FRAME, total, table)
        except (struct.error, ValueError) as error:
            raise SampleError(f"{path} is cut off within its head ({error}); copy it again") from error
        if version != 1 or items != count or self._rows < 1 or total < -(-items // self._rows):
            raise SampleError(f"{path} is damaged: it does not hold {count} samples, as its index says; copy it again")

    def item(self, at: int) -> memoryview:
        """The bytes of a sample."""
        number = at // self._rows
        frame: NDArray[np.uint8] = self._cache.get((str(self._path), number), lambda: self._frame(number))
        start, stop = (int(self._offsets[i]) - int(self._offsets[number * self._rows]) for i in (at, at + 1))
        if not 0 <= start <= stop <= len(frame):
            raise SampleError(f"sample {at} of {self._path} lies outside of its frame: the file is damaged")
        return frame.data[start:stop]

    def _frame(self, number: int) -> NDArray[np.uint8]:
        _, _, at, nbytes, whole = self._frames[number].tolist()
        where = f"frame {number} of {self._path}"
        if whole > _MOST_NBYTES or at + nbytes > len(self._data):
            raise SampleError(f"{where} claims {nbytes} bytes that make {whole}: the file is damaged")
        return inflated(self._data[at : at + nbytes], "zstd", whole, where, "litdata")


class ArrowItems:
    """Rows of an Arrow file at the end of the chunk, in record batches of equal length; the last used are kept."""

    def __init__(self, data: NDArray[np.uint8], count: int, path: Path, batches: Cache) -> None:
        length = int(data[-12:-8].view("<u4")[0])
        self._ipc, self._path, self._cache = data[max(0, len(data) - 12 - length) : -12], path, batches
        self._rows = max(1, self._batch(0).num_rows)
        last = self._reading(lambda reader: reader.num_record_batches - 1)
        rows = self._rows * last + self._batch(last).num_rows
        if rows != count:
            raise SampleError(f"{path} is damaged: it holds {rows} samples, its index says {count}; copy it again")

    def item(self, at: int) -> dict[str, Any]:
        """A sample."""
        batch = self._batch(at // self._rows)
        row: dict[str, Any] = batch.slice(at % self._rows, 1).to_pylist()[0]
        return row

    def _batch(self, number: int) -> Any:
        return self._cache.get(
            (str(self._path), number), lambda: self._reading(lambda reader: reader.get_batch(number))
        )

    def _reading(self, use: Callable[[Any], Any]) -> Any:
        """What `use` makes of a reader of its own: no two threads share one."""
        pyarrow = extras.load("pyarrow", "litdata", "datasets.LitData, for nested samples,")
        ipc = extras.load("pyarrow.ipc", "litdata", "datasets.LitData, for nested samples,")
        try:
            return use(ipc.open_file(pyarrow.py_buffer(self._ipc)))
        except (pyarrow.ArrowException, OSError) as error:
            raise SampleError(f"{self._path} has no readable table at its end ({error}); copy it again") from error


Cache = OnceCache[tuple[str, int], Any]


def items_of(data: NDArray[np.uint8], count: int, path: Path, wrapped: str, cache: Cache) -> Items:
    """The samples of a chunk whose file, if it was compressed as a whole, has been decompressed."""
    if data[:8].tobytes() == _FRAMED:
        return FramedItems(data, count, path, cache)
    if data[-8:].tobytes() == _ARROW and len(data) >= 12:
        return ArrowItems(data, count, path, cache)
    return RawItems(data, count, path, wrapped == "sample")


def offsets_of(data: NDArray[np.uint8], count: int, path: Path) -> memoryview:
    """Where samples begin, and where the last one ends; checked, because a wrong one would read something else."""
    first = 4 * (count + 2)
    offsets = data[4:first].view("<u4").astype(np.uint32, copy=False) if len(data) >= first else np.empty(0, np.uint32)
    if not (
        len(offsets)
        and int(data[:4].view("<u4")[0]) == count
        and offsets[0] >= first
        and offsets[-1] == len(data)
        and (offsets[1:] >= offsets[:-1]).all()
    ):
        raise SampleError(f"{path} is damaged: it does not hold {count} samples, as its index says; copy it again")
    return offsets.data


def _content_nbytes(data: memoryview, where: str) -> int:
    """What a zstd frame says it holds (RFC 8878, 3.1.1.1); SampleError if it does not say, or too much."""
    try:
        if bytes(data[:4]) != _ZSTD:
            raise ValueError("it is not compressed with zstd")
        told = data[4]
        single, width = told >> 5 & 1, (0, 2, 4, 8)[told >> 6]
        at = 5 + (not single) + (0, 1, 2, 4)[told & 3]
        width = width or single
        nbytes = int.from_bytes(data[at : at + width], "little") + 256 * (width == 2)
        if not width or nbytes > _MOST_NBYTES:
            raise ValueError(f"it claims {nbytes if width else 'no'} bytes")
    except (ValueError, IndexError) as error:
        raise SampleError(f"{where} cannot be decompressed ({error})") from error
    return nbytes
