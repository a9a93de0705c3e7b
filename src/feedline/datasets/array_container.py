r"""A file format for named integer arrays that can be memory-mapped.

    b"feedline arrays\n" · version, length and CRC-32 of the table (each uint32) · the table · padding · the arrays

Numbers are little endian. The table is JSON: `{"metadata": {…}, "arrays": {name: [dtype, shape, offset, CRC-32]}}`.
Offsets count from the first 64-byte boundary after the table, and each array is aligned to 64 bytes. Reading a file
never runs code, because it contains no pickle. The table is checked on every read, so that many files open fast. Arrays
are checked when a process maps them for the first time.

The module also reads `.npy` arrays inside a larger buffer, without a copy.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from feedline.core.kernels import crc32
from feedline.core.paths import replacing
from feedline.errors import SampleError, note
from feedline.stores.base import FileVersion

_MAGIC = b"feedline arrays\n"


_PREFACE = struct.Struct("<16sIII")


_VERSION = 3


_ALIGNMENT = 64


_GLANCE_NBYTES = 4096


_DTYPES = frozenset(("|u1", "<u2", "<u4", "<u8", "<i4", "<i8"))


_checked: set[tuple[int, FileVersion]] = set()
"""Device, inode and version of files whose arrays this process has checked, because shards are reopened often."""


class ArrayPlace(NamedTuple):
    """Type, shape, offset and checksum of one array.

    `offset` counts from the first byte after the table.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    crc32: int

    @property
    def stop(self) -> int:
        """The offset of the first byte after the array."""
        return self.offset + prod(self.shape) * np.dtype(self.dtype).itemsize


class ArrayTable(NamedTuple):
    """The parsed table of a file.

    `data` is the file position from which array offsets count.
    """

    metadata: dict[str, Any]
    arrays: dict[str, ArrayPlace]
    data: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays."""
        return {name: place.shape for name, place in self.arrays.items()}

    @property
    def nbytes(self) -> int:
        """The size that the whole file must have."""
        return self.data + max((place.stop for place in self.arrays.values()), default=0)


class NamedArrays(NamedTuple):
    """Metadata and read-only array views of one mapping or buffer."""

    metadata: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def pack(metadata: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[bytes | memoryview]:
    """Serialize metadata and arrays into pieces of a file.

    Arrays must have little-endian integer dtypes. The pieces may be views of the arrays.
    """
    places, pieces, offset = {}, list[bytes | memoryview](), 0
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array)
        data = flat.reshape(-1).view(np.uint8).data
        places[name] = ArrayPlace(flat.dtype.str, flat.shape, offset, crc32(data))
        padding = -flat.nbytes % _ALIGNMENT
        pieces += [data, bytes(padding)]
        offset += flat.nbytes + padding
    table = json.dumps({"metadata": metadata, "arrays": places}, separators=(",", ":")).encode()
    preface = _PREFACE.pack(_MAGIC, _VERSION, len(table), crc32(memoryview(table))) + table
    return [preface.ljust(_aligned(len(preface)), b"\0"), *pieces]


def write(path: str, metadata: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a file atomically, and its folder if it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.writelines(pack(metadata, arrays))


def read_table(path: str) -> ArrayTable:
    """Read the table of a file with one small read.

    SampleError for a file of another format, and for a damaged or truncated file.
    """
    with open(path, "rb", buffering=0) as file:
        table, _ = _read_table(file.fileno(), path)
        return table


def open_mapped(path: str) -> NamedArrays:
    """Map the arrays of a file.

    Checksums are verified the first time that a process opens the file. SampleError if it is damaged.
    """
    with open(path, "rb", buffering=0) as file:
        table, status = _read_table(file.fileno(), path)
        result = _views(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), table, path)
    state = status.st_dev, FileVersion.of(status, with_inode=True)
    if state not in _checked:
        _check_checksums(result, table, path)
        _checked.add(state)
    return result


def parse(data: bytes, name: str) -> NamedArrays:
    """Parse a whole file in memory; `name` identifies it in errors.

    The arrays are views of `data`.
    """
    table = _parse_table(data, lambda: b"", name)
    result = _views(data, table, name)
    _check_checksums(result, table, name)
    return result


def narrow(array: NDArray[Any]) -> NDArray[Any]:
    """Cast to the smallest unsigned dtype from uint16 that holds all values."""
    most = int(array.max(initial=0))
    dtype = next(dtype for dtype in ("<u2", "<u4", "<u8") if most <= np.iinfo(dtype).max)
    return array.astype(dtype)


def _read_table(fd: int, path: str) -> tuple[ArrayTable, os.stat_result]:
    begin = os.pread(fd, _GLANCE_NBYTES, 0)
    table = _parse_table(begin, lambda: os.pread(fd, 1 << 30, len(begin)), path)
    status = os.fstat(fd)
    _check_length(status.st_size, table, path)
    return table, status


def _parse_table(begin: bytes, more: Any, path: str) -> ArrayTable:
    """Parse the table at the beginning of a file.

    `more()` returns the bytes that follow `begin`, and is called only for a longer table.
    """
    if len(begin) < _PREFACE.size or not begin.startswith(_MAGIC):
        raise SampleError(f"{path} is not a file of feedline arrays")
    _, version, nbytes, promised = _PREFACE.unpack_from(begin)
    if version != _VERSION:
        raise _unusable_error(f"{path} has version {version} of the format; this feedline reads {_VERSION}")
    stop = _PREFACE.size + nbytes
    text = begin[_PREFACE.size : stop] if stop <= len(begin) else (begin + more())[_PREFACE.size : stop]
    if crc32(memoryview(text)) != promised:
        raise _unusable_error(f"{path} is damaged: the checksum of its table does not match")
    try:
        table = json.loads(text)
        arrays = {name: _place(*place) for name, place in table["arrays"].items()}
        return ArrayTable(table["metadata"], arrays, _aligned(stop))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SampleError(f"{path} is damaged: its table cannot be read ({error})") from error


def _place(dtype: str, shape: list[int], offset: int, checksum: int) -> ArrayPlace:
    whole = all(type(number) is int and number >= 0 for number in (offset, *shape))
    if dtype not in _DTYPES or not whole or offset % _ALIGNMENT:
        raise ValueError(f"an array of {dtype} and shape {shape} at {offset}")
    return ArrayPlace(dtype, tuple(shape), offset, checksum)


def _views(buffer: Any, table: ArrayTable, path: str) -> NamedArrays:
    _check_length(len(buffer), table, path)
    return NamedArrays(
        table.metadata,
        {
            name: np.frombuffer(buffer, dtype, prod(shape), table.data + offset).reshape(shape)
            for name, (dtype, shape, offset, _) in table.arrays.items()
        },
    )


def _check_length(nbytes: int, table: ArrayTable, path: str) -> None:
    if nbytes < table.nbytes:
        raise SampleError(f"{path} is truncated: it has {nbytes:,} bytes, its table describes {table.nbytes:,}")


def _check_checksums(named: NamedArrays, table: ArrayTable, path: str) -> None:
    for name, array in named.arrays.items():
        if crc32(array.reshape(-1).view(np.uint8).data) != table.arrays[name].crc32:
            raise _unusable_error(f"{path} is damaged: the checksum of its array {name!r} does not match")


def _unusable_error(text: str) -> SampleError:
    error = SampleError(text)
    note(error, "Remove the file, and it is built again.")  # for callers that do not rebuild the file themselves
    return error


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


_NPY_MAGIC = b"\x93NUMPY"


class NpyHeader(NamedTuple):
    """Fields of a `.npy` header, and the offset of the data."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int


def is_array(data: bytes | memoryview) -> bool:
    """True for data with the magic bytes of a `.npy` array."""
    return data[:6] == _NPY_MAGIC


def layout(data: memoryview, nbytes: int | None = None) -> NpyHeader:
    """Parse and check the header of a `.npy` array.

    `data` may be only the beginning of the array if `nbytes` is its whole length. ValueError if it is not a `.npy`
    array, holds Python objects, or is truncated.
    """
    found = len(data) if nbytes is None else nbytes
    if len(data) < 12 or not is_array(data):
        raise ValueError("not a .npy array")
    header = 10 + int.from_bytes(data[8:10], "little") if data[6] == 1 else 12 + int.from_bytes(data[8:12], "little")
    parsed = _parse_npy_header(bytes(data[: min(header, len(data))]))
    # NumPy accepts negative lengths, whose product could pass the size check below.
    if min(parsed.shape, default=0) < 0:
        raise ValueError(f"the header of the .npy array claims the shape {parsed.shape}")
    wanted = parsed.offset + prod(parsed.shape) * parsed.dtype.itemsize
    if found < wanted:
        raise ValueError(f"the .npy array is truncated: {found:,} bytes, its header describes {wanted:,}")
    return parsed


def array(data: memoryview) -> NDArray[Any]:
    """The array as a read-only view of `data`."""
    header = layout(data)
    flat: NDArray[Any] = np.frombuffer(data, header.dtype, prod(header.shape), header.offset)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


@lru_cache(maxsize=4096)  # arrays of one shape have one header
def _parse_npy_header(header: bytes) -> NpyHeader:
    file = io.BytesIO(header)
    version = npy.read_magic(file)
    try:
        shape, fortran, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
    except (SyntaxError, RecursionError, TokenError, TypeError) as error:  # NumPy parses the header as a Python literal
        raise ValueError(f"the header of the .npy array is damaged ({error})") from error
    if dtype.hasobject:
        raise ValueError("the .npy array holds Python objects, which only pickle could read; save it as numbers")
    return NpyHeader(dtype, shape, fortran, file.tell())
