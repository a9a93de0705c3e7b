"""Offsets of stripes and their streams in ORC files, from footers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.datasets import protobuf
from feedline.datasets.file_objects import ReadRanges
from feedline.stores.base import Range

# https://orc.apache.org/specification/ORCv1/
_TAIL_NBYTES = 16 << 10
"""Bytes at the end of a file that pyarrow's reader requests first."""


HEADER_NBYTES = 3
"""Bytes in front of a compressed block."""


_BLOCK_NBYTES = 256 << 10
"""Size of blocks in files that do not name it."""


_MOST_BLOCK_NBYTES = 64 << 20
"""Larger compression blocks are damage: pyarrow allocates one for each stream. Writers have a limit of 8 MiB."""


_MOST_STREAM_NBYTES = 1 << 40


_KIND_TAG = 1 << 3


_STREAM_TAGS = (1 << 3 | 2, _KIND_TAG, 2 << 3, 3 << 3)
"""Tags of a stream and of its kind, column and length in the footer of a stripe."""


_MAGIC = b"ORC"


class DamagedORCError(Exception):
    """Damage in an ORC file, described by the text."""


class ORCType(IntEnum):
    """Kinds of columns that are read or checked apart from others."""

    BOOLEAN = 0
    BYTE = 1
    FLOAT = 5
    DOUBLE = 6
    STRING = 7
    BINARY = 8
    LIST = 10
    MAP = 11
    STRUCT = 12
    DECIMAL = 14
    VARCHAR = 16
    CHAR = 17


class ORCLayout(NamedTuple):
    """Stripes of a file, and the streams of their columns."""

    tail: bytes
    """The end of the file, from its footer on."""
    stripes: NDArray[np.int64]
    """Rows of (start, start of the footer, stop, number of rows)."""
    streams: NDArray[np.int64]
    """Rows of (stripe, column, start, stop)."""
    types: list[tuple[int, list[int]]]
    """The kind of each column, and the numbers of its members."""
    codec: int
    block_nbytes: int
    """The size of compressed blocks without compression."""

    @property
    def fields(self) -> list[tuple[int, int]]:
        """The first and last column number of each field, in order."""
        # Columns are numbered depth first, so that a field ends where the next one begins.
        firsts = self.types[0][1]
        return [(first, after - 1) for first, after in zip(firsts, [*firsts[1:], len(self.types)], strict=True)]

    def inflate(self, data: bytes) -> bytes:
        """Decompress a part of the file."""
        return _inflater(self.codec)(data)

    def spans(self, stripe: int, fields: Sequence[int]) -> list[Range]:
        """Byte ranges for reads of these fields of a stripe."""
        _, footer, stop, _ = self.stripes[stripe].tolist()
        columns = self.streams[:, 1]
        chosen = columns == 0
        columns_of_fields = self.fields
        for field in fields:
            first, last = columns_of_fields[field]
            chosen |= (columns >= first) & (columns <= last)
        of_stripe = self.streams[chosen & (self.streams[:, 0] == stripe)]
        return [*map(tuple, of_stripe[:, 2:].tolist()), (footer, stop)]


def read_layout(nbytes: int, read: ReadRanges, *, with_streams: bool = True) -> ORCLayout:
    """Read the layout of a file of `nbytes` bytes.

    Takes one request, another for a long footer, and another for the footers of all stripes. The latter are needed only
    `with_streams`. DamagedORCError gives the reason if there is no layout.
    """
    try:
        return _layout(nbytes, read, with_streams)
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, zlib.error, OSError) as error:
        raise DamagedORCError(f"its footer is damaged: {error}") from error


def _layout(nbytes: int, read: ReadRanges, with_streams: bool) -> ORCLayout:
    start = max(0, nbytes - _TAIL_NBYTES)
    tail = bytes(read([(start, nbytes)])[0]) if nbytes else b""
    if not tail or not 4 <= tail[-1] < len(tail):
        raise DamagedORCError("it has no footer at its end")
    script_at = nbytes - 1 - tail[-1]
    script = protobuf.by_number(tail[script_at - start : -1])
    if bytes(script.get(8000, b"")) != _MAGIC:
        raise DamagedORCError("it has no footer at its end")
    if script.get(3, 0) > _MOST_BLOCK_NBYTES:
        raise DamagedORCError(f"it claims blocks of {script[3]} bytes")
    footer_at = script_at - script[1]
    first = min(start, footer_at - script.get(5, 0))
    if first < 0:
        raise DamagedORCError("its footer is longer than the file")
    if first < start:
        tail = bytes(read([(first, start)])[0]) + tail
    inflate = _inflater(script.get(2, 0))
    footer = list(protobuf.messages(inflate(tail[footer_at - first : script_at - first])))
    stripes = _stripes([protobuf.by_number(data) for number, data in footer if number == 3], nbytes)
    _check_alone(stripes, footer_at - script.get(5, 0), read)
    footers = read([(int(at), int(stop)) for _, at, stop, _ in stripes]) if with_streams else []
    streams = [_streams(stripe, int(stripes[stripe, 0]), inflate(bytes(data))) for stripe, data in enumerate(footers)]
    types = _column_types([data for number, data in footer if number == 4])
    rows = np.concatenate([np.empty((0, 4), np.int64), *streams])
    return ORCLayout(tail, stripes, rows, types, script.get(2, 0), script.get(3, _BLOCK_NBYTES))


def _stripes(described: Sequence[dict[int, Any]], nbytes: int) -> NDArray[np.int64]:
    rows = []
    for each in described:
        start, footer = each.get(1, 0), each.get(1, 0) + each.get(2, 0) + each.get(3, 0)
        if not 0 <= start <= footer <= footer + each.get(4, 0) <= nbytes:
            raise DamagedORCError("its footer refers to bytes beyond the end of the file")
        rows.append((start, footer, footer + each.get(4, 0), each.get(5, 0)))
    return np.array(rows, np.int64).reshape(-1, 4)


def _check_alone(stripes: NDArray[np.int64], end: int, read: ReadRanges) -> None:
    """Raise DamagedORCError for files that were joined.

    The last footer has the places of stripes in the last file.
    """
    before = end - int(stripes[:, 2].max(initial=0))
    if len(stripes) and before > len(_MAGIC) and bytes(read([(before, before + len(_MAGIC))])[0]) == _MAGIC:
        raise DamagedORCError(f"it contains several files, one behind the other; the last one begins at byte {before}")


def _streams(stripe: int, start: int, footer: bytes) -> NDArray[np.int64]:
    found, _ = stripe_streams(footer)
    stops = start + np.cumsum(found[:, 2])
    return np.column_stack((np.full(len(found), stripe), found[:, 1], stops - found[:, 2], stops))


def stripe_streams(footer: bytes) -> tuple[NDArray[np.int64], list[bytes]]:
    """The streams of a stripe, and the encodings of its columns.

    Streams are rows of (kind, column, number of bytes). Encodings are messages. `footer` is the footer of the stripe,
    without compression.
    """
    # A loop takes milliseconds for a thousand columns. Most writers give the same three numbers for each stream.
    ends = np.flatnonzero(np.frombuffer(footer, np.uint8) < 0x80)
    size = 2 * len(_STREAM_TAGS)
    places = ends[: len(ends) // size * size].reshape(-1, size)
    numbers = protobuf.varints(footer[: int(places[-1, -1]) + 1]).reshape(-1, size) if len(places) else places
    has_form = (numbers[:, ::2] == _STREAM_TAGS).all(axis=1) & (numbers[:, 1] == places[:, -1] - places[:, 1])
    count = len(has_form) if has_form.all() else int(has_form.argmin())
    rest = list(protobuf.messages(footer[int(places[count - 1, -1]) + 1 if count else 0 :]))
    others = [protobuf.by_number(data) for number, data in rest if number == 1]
    rows = [[each.get(number, 0) for number in (1, 2, 3)] for each in others]
    found = np.concatenate((numbers[:count, 3::2].astype(np.uint64), np.array(rows, np.uint64).reshape(-1, 3)))
    if found.max(initial=0) > _MOST_STREAM_NBYTES:
        raise DamagedORCError("its streams are longer than any file")
    return found.astype(np.int64), [data for number, data in rest if number == 2]


def _column_types(described: Sequence[bytes]) -> list[tuple[int, list[int]]]:
    types = []
    for column, data in enumerate(described):
        if len(data) == 2 and data[0] == _KIND_TAG and data[1] < 0x80:  # nearly all: a kind without members
            types.append((data[1], list[int]()))
            continue
        fields = [(number, value) for number, _, value in protobuf.fields(data)]
        kinds = [value for number, value in fields if number == 1 and isinstance(value, int)]
        members = [each for number, value in fields if number == 2 for each in _numbers(value)]
        types.append((kinds[-1] if kinds else 0, members))
        if any(not column < member < len(described) for member in members):
            raise DamagedORCError(f"its column {column} has members that do not exist")
    if not types or types[0][0] != ORCType.STRUCT:
        raise DamagedORCError("its rows are not structs")
    return types


def _numbers(value: Any) -> list[int]:
    """The numbers of one occurrence of a repeated field, packed or not."""
    return [value] if isinstance(value, int) else [int(each) for each in protobuf.varints(value)]


def _inflater(codec: int) -> Callable[[bytes], bytes]:
    """A function that decompresses a part of a file."""
    if codec == 0:
        return bytes
    inflate = _CODECS.get(codec)
    if inflate is None:
        raise DamagedORCError(f"its compression {codec} is not supported")

    def whole(data: bytes) -> bytes:
        parts, at = [], 0
        while at < len(data):
            # Writers store an incompressible block without compression, and mark it in the lowest bit.
            header = int.from_bytes(data[at : at + HEADER_NBYTES], "little")
            at += HEADER_NBYTES
            block = data[at : at + (header >> 1)]
            parts.append(block if header & 1 else inflate(block))
            at += header >> 1
        return b"".join(parts)

    return whole


def _arrow() -> Any:
    return optional.load("pyarrow", "arrow", "datasets.ORC")


def _zlib(data: bytes) -> bytes:
    return zlib.decompress(data, -zlib.MAX_WBITS)


def _snappy(data: bytes) -> bytes:
    nbytes, _ = protobuf.varint(data, 0)
    if nbytes > _MOST_BLOCK_NBYTES:
        raise ValueError(f"a block claims {nbytes} bytes")
    return bytes(_arrow().decompress(data, nbytes, codec="snappy", asbytes=True))


def _zstd(data: bytes) -> bytes:
    arrow = _arrow()
    return bytes(arrow.input_stream(arrow.py_buffer(data), compression="zstd").read())


def _lz4(data: bytes) -> bytes:
    """Decompress one raw LZ4 block, whose size is not stored."""
    out, at = bytearray(), 0

    def extended(length: int) -> int:
        """Add the bytes that follow a length of 15."""
        nonlocal at
        more = length == 15
        while more:
            length, more, at = length + data[at], data[at] == 255, at + 1
        return length

    while at < len(data):
        token = data[at]
        at += 1
        literals = extended(token >> 4)
        out += data[at : at + literals]
        at += literals
        if at >= len(data):
            break
        offset = data[at] | data[at + 1] << 8
        at += 2
        length = extended(token & 15) + 4
        if not 0 < offset <= len(out):
            raise ValueError("an offset leads to bytes before the block")
        repeated = out[-offset:]
        out += (repeated * (length // offset + 1))[:length]
    return bytes(out)


_CODECS = {1: _zlib, 2: _snappy, 4: _lz4, 5: _zstd}
