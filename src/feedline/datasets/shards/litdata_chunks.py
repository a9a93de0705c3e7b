r"""Samples within a LitData chunk, in each form that litdata writes.

A chunk holds offsets and raw samples, samples compressed in frames, or an Arrow file of record batches, which are read
separately.

The Arrow file (https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format) is at the end of the chunk. Its
footer and the head of a batch are FlatBuffers. Only a few of their numbers are needed. The file is followed by its
length (uint32) and `b"LDARW01\0"`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.caches import LoadingCache
from feedline.datasets.compression import ORDINARY_NBYTES, inflate
from feedline.datasets.flatbuffers import INT64, DamagedError, FlatTable
from feedline.datasets.shards.files import Ends, ReadBytes, offsets_in
from feedline.errors import SampleError
from feedline.stores.base import Range

MAGIC = b"LDARW01\0"


_TAIL = struct.Struct("<i6sI8s")
"""Length of the footer, Arrow's magic, length of the file, LitData's magic."""


_TAIL_READ_NBYTES = 4096


_BLOCK = struct.Struct("<qi4xq")


_SCHEMA_AT = 8


_MESSAGE_AT = 8
"""Bytes of the marker and length before a message."""


_DAMAGE = (struct.error, ValueError, LookupError, DamagedError)


class Block(NamedTuple):
    """Position of a record batch: `head` bytes of metadata, then `body` bytes."""

    start: int
    head: int
    body: int


class LitDataRows:
    """Samples as rows of equal-length record batches, decoded with a cache."""

    def __init__(self, ends: Ends, nbytes: int, count: int, where: str, batches: LoadingCache[Any, Any]) -> None:
        self._where, self._cache = where, batches
        try:
            self._first = _file_at(ends.end.data, nbytes)
            self._blocks = _blocks(ends.end.data)
            self._schema = ends.begin.data[: self._blocks[0].start - _SCHEMA_AT]
            self._rows = _rows_in(ends.begin.data[len(self._schema) :])
        except _DAMAGE as error:
            raise SampleError(f"{where} has no valid Arrow file at its end ({error}); copy it again") from error
        if len(self._blocks) != -(-count // max(1, self._rows)):
            raise SampleError(
                f"{where} is damaged: its Arrow file has {len(self._blocks)} batches of {self._rows} samples, its index"
                f" says {count} samples; copy it again"
            )

    def span(self, at: int) -> tuple[int, int]:
        """Byte range of the batch that holds a sample."""
        start, head, body = self._blocks[at // self._rows]
        return self._first + start, self._first + start + head + body

    def is_cached(self, at: int) -> bool:
        """True if the sample's batch is decoded already."""
        return (self._where, at // self._rows) in self._cache

    def item(self, at: int, read: Callable[[], memoryview]) -> dict[str, Any]:
        """One sample, as a dict."""
        number, row = divmod(at, self._rows)
        batch = self._cache.get((self._where, number), lambda: self._decode(read()))
        if row >= batch.num_rows:
            raise SampleError(f"{self._where} is damaged: it does not hold sample {at}; copy it again")
        try:
            sample: dict[str, Any] = batch.slice(row, 1).to_pylist()[0]
        except ValueError as error:
            raise SampleError(f"{self._where} is damaged: sample {at} is not a row ({error}); copy it again") from error
        return sample

    def _decode(self, data: memoryview) -> Any:
        pyarrow = optional.load("pyarrow", "litdata", "datasets.LitData, for nested samples,")
        ipc = optional.load("pyarrow.ipc", "litdata", "datasets.LitData, for nested samples,")
        try:
            schema = ipc.read_schema(pyarrow.py_buffer(self._schema))
            batch = ipc.read_record_batch(ipc.read_message(pyarrow.py_buffer(data)), schema)
            # Offsets beyond the memory would crash the process, or reveal foreign memory.
            batch.validate(full=True)
        except (pyarrow.ArrowException, OSError, EOFError) as error:
            raise SampleError(f"{self._where} has no valid Arrow file at its end ({error}); copy it again") from error
        return batch


def ends_of_rows(read: ReadBytes, nbytes: int) -> tuple[memoryview, memoryview] | None:
    """Ends of a chunk with an Arrow file, else None.

    The beginning is the schema and the head of the first batch; the end is the footer and all that follows. Both are
    incomplete if the file is damaged.
    """
    tail = read(max(0, nbytes - _TAIL_READ_NBYTES), nbytes)
    if len(tail) < _TAIL.size or bytes(tail[-len(MAGIC) :]) != MAGIC:
        return None
    first, footer = _file_at(tail, nbytes), nbytes - _TAIL.size - _TAIL.unpack(tail[-_TAIL.size :])[0]
    try:
        if not 0 <= first <= footer <= nbytes:
            raise ValueError(f"a footer at byte {footer} of a file that begins at {first}")
        end = tail[footer - nbytes :] if nbytes - footer <= len(tail) else read(footer, nbytes)
        start, head, _ = _blocks(end)[0]
        return read(first + _SCHEMA_AT, min(first + start + head, footer)), end
    except _DAMAGE:
        return memoryview(b""), tail


def _file_at(end: memoryview, nbytes: int) -> int:
    return int(nbytes - 12 - _TAIL.unpack(end[-_TAIL.size :])[2])


def _blocks(end: memoryview) -> list[Block]:
    """Record batches listed in the footer.

    ValueError if there are none, or if they need dictionary batches.
    """
    footer = end[: -_TAIL.size]
    table = FlatTable.root(footer)
    (_, dictionaries), (at, count) = (table.vector(field, _BLOCK.size) for field in (2, 3))
    if dictionaries or not count:
        raise ValueError(f"{count} batches and {dictionaries} dictionaries")
    blocks = [Block(*_BLOCK.unpack_from(footer, at + _BLOCK.size * number)) for number in range(count)]
    if any(min(block) < 0 for block in blocks):
        raise ValueError("a batch has a negative position or length")
    return blocks


def _rows_in(head: memoryview) -> int:
    """Number of rows of the batch that these metadata describe."""
    return FlatTable.root(head[_MESSAGE_AT:]).required(2).scalar(0, INT64)


_ZSTD = b"\x28\xb5\x2f\xfd"


_FRAMED = b"LDFZ01\0\0"


_HEAD = struct.Struct("<8sHHIII")


_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("at", "<u8"), ("nbytes", "<u4"), ("whole", "<u4")])


_NOTHING = memoryview(b"")


FetchContent = Callable[[], memoryview]


DecodedCache = LoadingCache[tuple[str, int], Any]


class ChunkItems(Protocol):
    """Samples of a chunk, by number."""

    def span(self, at: int) -> Range:
        """Byte range that holds a sample."""
        ...

    def is_cached(self, at: int) -> bool:
        """True if nothing needs to be read, because the sample is cached."""
        ...

    def item(self, at: int, read: FetchContent) -> Any:
        """Bytes of a sample; a table row itself.

        `read()` returns the bytes of `span(at)`.
        """
        ...


class RawItems:
    """Consecutive samples, found by the offsets at the chunk's beginning."""

    def __init__(self, ends: Ends, nbytes: int, count: int, where: str, inflates: bool) -> None:
        self._where, self._inflates = where, inflates
        self._offsets = offsets_in(ends.begin, count, nbytes, where)

    def span(self, at: int) -> Range:
        """Byte range of a sample."""
        return self._offsets[at], self._offsets[at + 1]

    def is_cached(self, at: int) -> bool:  # noqa: ARG002 - as others
        """Always False."""
        return False

    def item(self, at: int, read: FetchContent) -> memoryview:
        """Bytes of a sample, decompressed."""
        data = read()
        if not self._inflates:
            return data
        where = f"sample {at} of {self._where}"
        return inflate(np.frombuffer(data, np.uint8), "zstd", _content_nbytes(data, where), where, "litdata").data


class FramedItems:
    """Samples compressed in frames, with a cache of decompressed frames."""

    def __init__(self, ends: Ends, nbytes: int, count: int, where: str, frames: DecodedCache) -> None:
        self._where, self._cache = where, frames
        head = ends.begin.data
        try:
            _, version, _, items, self._rows, total = _HEAD.unpack_from(head)
            self._offsets = np.frombuffer(head, "<u4", items + 1, _HEAD.size)
            self._frames = np.frombuffer(head, _FRAME, total, _HEAD.size + 4 * (items + 1))
        except (struct.error, ValueError) as error:
            raise SampleError(f"{where} is truncated within its header ({error}); copy it again") from error
        if version != 1 or items != count or self._rows < 1 or total < -(-items // self._rows):
            raise SampleError(f"{where} is damaged: it does not hold the {count} samples in its index; copy it again")
        self._nbytes = nbytes

    def span(self, at: int) -> Range:
        """Byte range of the frame that holds a sample."""
        number = at // self._rows
        _, _, start, nbytes, whole = self._frames[number].tolist()
        if whole > ORDINARY_NBYTES or start + nbytes > self._nbytes:
            raise SampleError(
                f"frame {number} of {self._where} claims {nbytes} bytes that make {whole}: the file is damaged;"
                " copy it again"
            )
        return start, start + nbytes

    def is_cached(self, at: int) -> bool:
        """True if the sample's frame is decompressed already."""
        return (self._where, at // self._rows) in self._cache

    def item(self, at: int, read: FetchContent) -> memoryview:
        """Bytes of a sample."""
        number = at // self._rows
        frame: NDArray[np.uint8] = self._cache.get((self._where, number), lambda: self._frame(number, read()))
        start, stop = (int(self._offsets[i]) - int(self._offsets[number * self._rows]) for i in (at, at + 1))
        if not 0 <= start <= stop <= len(frame):
            raise SampleError(
                f"sample {at} of {self._where} is outside of its frame: the file is damaged; copy it again"
            )
        return frame.data[start:stop]

    def _frame(self, number: int, data: memoryview) -> NDArray[np.uint8]:
        whole = int(self._frames["whole"][number])
        return inflate(np.frombuffer(data, np.uint8), "zstd", whole, f"frame {number} of {self._where}", "litdata")


def open_items(ends: Ends, nbytes: int, count: int, where: str, wrapped: str, cache: DecodedCache) -> ChunkItems:
    """Samples of a chunk, read according to its form.

    A chunk that was compressed as a whole must be decompressed.
    """
    if len(ends.end):
        return LitDataRows(ends, nbytes, count, where, cache)
    if ends.begin[:8].tobytes() == _FRAMED:
        return FramedItems(ends, nbytes, count, where, cache)
    return RawItems(ends, nbytes, count, where, wrapped == "sample")


def chunk_ends(read: ReadBytes, nbytes: int, samples: int) -> tuple[memoryview, memoryview]:
    """Parts of a chunk with which its samples are found.

    They are offsets, the head of a chunk of frames, or the parts before and after the batches of an Arrow file.
    """
    begin = read(0, min(nbytes, max(_HEAD.size, 4 * (samples + 2))))
    if bytes(begin[:8]) == _FRAMED and len(begin) >= _HEAD.size:
        _, _, _, items, _, frames = _HEAD.unpack_from(begin)
        return read(0, min(nbytes, _HEAD.size + 4 * (items + 1) + _FRAME.itemsize * frames)), _NOTHING
    at = 4 * (samples + 1)
    if int.from_bytes(begin[at : at + 4], "little") == nbytes:
        return begin, _NOTHING
    return ends_of_rows(read, nbytes) or (begin, _NOTHING)


def _content_nbytes(data: memoryview, where: str) -> int:
    """Decompressed size in the header of a zstd frame (RFC 8878, 3.1.1.1).

    SampleError if the header has no size, or a size that is too large.
    """
    try:
        if bytes(data[:4]) != _ZSTD:
            raise ValueError("it is not compressed with zstd")
        descriptor = data[4]
        single, width = descriptor >> 5 & 1, (0, 2, 4, 8)[descriptor >> 6]
        at = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
        width = width or single
        nbytes = int.from_bytes(data[at : at + width], "little") + 256 * (width == 2)
        if not width or nbytes > ORDINARY_NBYTES:
            raise ValueError(f"it claims {nbytes if width else 'no'} bytes")
    except (ValueError, IndexError) as error:
        raise SampleError(f"{where} cannot be decompressed ({error})") from error
    return nbytes
