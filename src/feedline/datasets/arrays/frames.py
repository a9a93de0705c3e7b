"""Checks of compressed chunks before libraries in C read them.

numcodecs and the plugins of HDF5 do not pass the length of a chunk to c-blosc and bitshuffle. These rely on the sizes
in the chunk, and read beyond the end of a truncated one, which can crash the process. README_HEADER.rst of c-blosc 1
describes the header of Blosc, the README of bitshuffle its chunks in HDF5.
"""

from __future__ import annotations

import struct
from typing import Any

_HEADER = struct.Struct("<4B3i")


_NEWEST_VERSION = 2


_COPIED = 2
"""Flag of a frame whose data are not compressed."""


_LENGTH = struct.Struct(">I")


_BLOCK_ELEMENTS = 8
"""Bitshuffle's blocks have a multiple of this number of elements; the remaining elements are copied."""


def check_blosc(data: Any, expected_nbytes: int | None = None) -> None:
    """Raise ValueError for a damaged header or offset of a Blosc frame.

    `expected_nbytes` is the size of its data, if that is known.
    """
    frame = memoryview(data).cast("B")
    if frame.nbytes < _HEADER.size:
        raise ValueError(f"a Blosc frame of {frame.nbytes} bytes has no header")
    version, _, flags, itemsize, nbytes, block_nbytes, stored_nbytes = _HEADER.unpack_from(frame)
    if stored_nbytes != frame.nbytes:
        raise ValueError(f"its Blosc frame has {stored_nbytes} bytes, but {frame.nbytes} are stored")
    if not 1 <= version <= _NEWEST_VERSION:
        raise ValueError(f"version {version} of Blosc frames is unknown")
    if nbytes < 0 or (nbytes and not (itemsize and 0 < block_nbytes <= nbytes)):
        raise ValueError(f"its Blosc frame claims blocks of {block_nbytes} bytes for {nbytes} bytes of data")
    _check_size(nbytes, expected_nbytes)
    if flags & _COPIED:
        if stored_nbytes != nbytes + _HEADER.size:
            raise ValueError(f"its Blosc frame claims to hold {nbytes} bytes uncompressed")
    elif nbytes:
        _check_offsets(frame, -(-nbytes // block_nbytes))


def _check_offsets(frame: memoryview, num_blocks: int) -> None:
    """Raise ValueError unless each block begins after the table of offsets."""
    start = _HEADER.size + 4 * num_blocks
    if start > frame.nbytes:
        raise ValueError(f"its Blosc frame claims {num_blocks} blocks")
    offsets = struct.unpack_from(f"<{num_blocks}i", frame, _HEADER.size)
    if min(offsets) < start or max(offsets) > frame.nbytes - 4:
        raise ValueError("a block of its Blosc frame is outside of it")


def check_count(data: Any) -> None:
    """Raise ValueError if a chunk claims more values than it holds.

    The values have variable lengths. numcodecs allocates memory for all of them, up to 32 GiB, before it reads the
    first.
    """
    chunk = memoryview(data).cast("B")
    count = int.from_bytes(chunk[:4], "little")
    if 4 * (count + 1) > chunk.nbytes:  # the number of values, and the length of each
        raise ValueError(f"a chunk of {chunk.nbytes} bytes claims {count} values")


def check_bitshuffle(data: Any, itemsize: int, expected_nbytes: int | None = None) -> None:
    """Raise ValueError unless the blocks of bitshuffle fill the chunk.

    `expected_nbytes` is the size of its data, if that is known.
    """
    chunk = memoryview(data).cast("B")
    if chunk.nbytes < 12:
        raise ValueError(f"a chunk of bitshuffle of {chunk.nbytes} bytes has no header")
    remaining, block_nbytes = struct.unpack_from(">QI", chunk)
    _check_size(remaining, expected_nbytes)
    unit = _BLOCK_ELEMENTS * itemsize
    if not (unit and block_nbytes) or block_nbytes % unit:
        raise ValueError(f"a chunk of bitshuffle claims blocks of {block_nbytes} bytes")
    copied, at = remaining % unit, 12
    try:
        for _ in range(-(-(remaining - copied) // block_nbytes)):
            at += 4 + _LENGTH.unpack_from(chunk, at)[0]
    except struct.error:  # the block begins beyond the end
        at = -1
    if at < 0 or at + copied != chunk.nbytes:
        raise ValueError(f"the blocks of a chunk of bitshuffle do not fill its {chunk.nbytes} bytes")


def _check_size(nbytes: int, expected_nbytes: int | None) -> None:
    if expected_nbytes is not None and nbytes != expected_nbytes:
        raise ValueError(f"it claims to hold {nbytes} bytes, but the chunk has {expected_nbytes}")
