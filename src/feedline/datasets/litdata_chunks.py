"""The samples in a chunk of LitData, in each of the ways that it writes them: what is read for one, what it is."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.inflating import ORDINARY_NBYTES, inflated
from feedline.datasets.litdata_rows import Rows, ends_of_rows
from feedline.datasets.once import OnceCache
from feedline.datasets.shard_ends import Ends, Read, offsets_in
from feedline.errors import SampleError
from feedline.stores.protocol import Range

_ZSTD = b"\x28\xb5\x2f\xfd"
_FRAMED = b"LDFZ01\0\0"
_HEAD = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("at", "<u8"), ("nbytes", "<u4"), ("whole", "<u4")])
_NOTHING = memoryview(b"")

Fetch = Callable[[], memoryview]
Cache = OnceCache[tuple[str, int], Any]


class Items(Protocol):
    """The samples of a chunk by number."""

    def span(self, at: int) -> Range:
        """Where to read what a sample is in."""
        ...

    def kept(self, at: int) -> bool:
        """Whether it need not be read, because others that it lies with were."""
        ...

    def item(self, at: int, read: Fetch) -> Any:
        """The bytes of a sample, or, in Arrow's form, the sample itself; `read()` gives what `span` says."""
        ...


class RawItems:
    """Samples one after the other, each within the offsets that come first."""

    def __init__(self, ends: Ends, nbytes: int, count: int, where: str, inflates: bool) -> None:
        self._where, self._inflates = where, inflates
        self._offsets = offsets_in(ends.begin, count, nbytes, where)

    def span(self, at: int) -> Range:
        """Where a sample lies."""
        return self._offsets[at], self._offsets[at + 1]

    def kept(self, at: int) -> bool:  # noqa: ARG002 - as others
        """Nothing is."""
        return False

    def item(self, at: int, read: Fetch) -> memoryview:
        """The bytes of a sample."""
        data = read()
        if not self._inflates:
            return data
        where = f"sample {at} of {self._where}"
        return inflated(np.frombuffer(data, np.uint8), "zstd", _content_nbytes(data, where), where, "litdata").data


class FramedItems:
    """Samples compressed some at a time; the frames that were used last are kept."""

    def __init__(self, ends: Ends, nbytes: int, count: int, where: str, frames: Cache) -> None:
        self._where, self._cache = where, frames
        head = ends.begin.data
        try:
            _, version, _, items, self._rows, total = _HEAD.unpack_from(head)
            self._offsets = np.frombuffer(head, "<u4", items + 1, _HEAD.size)
            self._frames = np.frombuffer(head, _FRAME, total, _HEAD.size + 4 * (items + 1))
        except (struct.error, ValueError) as error:
            raise SampleError(f"{where} is cut off within its head ({error}); copy it again") from error
        if version != 1 or items != count or self._rows < 1 or total < -(-items // self._rows):
            raise SampleError(f"{where} is damaged: it does not hold {count} samples, as its index says; copy it again")
        self._nbytes = nbytes

    def span(self, at: int) -> Range:
        """Where the frame of a sample lies."""
        number = at // self._rows
        _, _, start, nbytes, whole = self._frames[number].tolist()
        if whole > ORDINARY_NBYTES or start + nbytes > self._nbytes:
            raise SampleError(
                f"frame {number} of {self._where} claims {nbytes} bytes that make {whole}: the file is damaged"
            )
        return start, start + nbytes

    def kept(self, at: int) -> bool:
        """Whether its frame is decompressed."""
        return (self._where, at // self._rows) in self._cache

    def item(self, at: int, read: Fetch) -> memoryview:
        """The bytes of a sample."""
        number = at // self._rows
        frame: NDArray[np.uint8] = self._cache.get((self._where, number), lambda: self._frame(number, read()))
        start, stop = (int(self._offsets[i]) - int(self._offsets[number * self._rows]) for i in (at, at + 1))
        if not 0 <= start <= stop <= len(frame):
            raise SampleError(f"sample {at} of {self._where} lies outside of its frame: the file is damaged")
        return frame.data[start:stop]

    def _frame(self, number: int, data: memoryview) -> NDArray[np.uint8]:
        whole = int(self._frames["whole"][number])
        return inflated(np.frombuffer(data, np.uint8), "zstd", whole, f"frame {number} of {self._where}", "litdata")


def items_of(ends: Ends, nbytes: int, count: int, where: str, wrapped: str, cache: Cache) -> Items:
    """The samples of a chunk whose file, if it was compressed as a whole, has been decompressed."""
    if len(ends.end):
        return Rows(ends, nbytes, count, where, cache)
    if ends.begin[:8].tobytes() == _FRAMED:
        return FramedItems(ends, nbytes, count, where, cache)
    return RawItems(ends, nbytes, count, where, wrapped == "sample")


def chunk_ends(read: Read, nbytes: int, samples: int) -> tuple[memoryview, memoryview]:
    """Offsets, or the head of frames; of Arrow's form, what tells its batches from both sides of them."""
    begin = read(0, min(nbytes, max(_HEAD.size, 4 * (samples + 2))))
    if bytes(begin[:8]) == _FRAMED and len(begin) >= _HEAD.size:
        _, _, _, items, _, frames = _HEAD.unpack_from(begin)
        return read(0, min(nbytes, _HEAD.size + 4 * (items + 1) + _FRAME.itemsize * frames)), _NOTHING
    at = 4 * (samples + 1)
    if int.from_bytes(begin[at : at + 4], "little") == nbytes:
        return begin, _NOTHING
    return ends_of_rows(read, nbytes) or (begin, _NOTHING)


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
        if not width or nbytes > ORDINARY_NBYTES:
            raise ValueError(f"it claims {nbytes if width else 'no'} bytes")
    except (ValueError, IndexError) as error:
        raise SampleError(f"{where} cannot be decompressed ({error})") from error
    return nbytes
