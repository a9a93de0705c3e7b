r"""A small file of named arrays: a table in JSON, then the arrays, each aligned to 64 bytes so that it can be mapped.

    b"feedline arrays\n" · version, length of the table (uint32, little endian) · the table · padding · the arrays

The table is `{"told": {…}, "arrays": {name: [dtype, shape, offset]}}`; offsets count from the first 64-byte border
after the table. There is nothing in it that could run: no pickle.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.errors import SampleError

_MAGIC = b"feedline arrays\n"
_PREFACE = struct.Struct("<16sII")
_VERSION = 1
_ALIGNMENT = 64
_GLANCE_NBYTES = 4096
_DTYPES = frozenset(("|u1", "<u2", "<u4", "<u8", "<i4", "<i8"))


class Table(NamedTuple):
    """The head of a file of arrays: what was told of them, dtype, shape and place of each, where the data begin."""

    told: dict[str, Any]
    arrays: dict[str, tuple[str, tuple[int, ...], int]]
    data: int

    @property
    def nbytes(self) -> int:
        """The size that the whole file must have."""
        ends = (offset + prod(shape) * np.dtype(dtype).itemsize for dtype, shape, offset in self.arrays.values())
        return self.data + max(ends, default=0)


class Arrays(NamedTuple):
    """Arrays by name, read-only views of one mapping or buffer, and what was told of them."""

    told: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


def packed(told: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[bytes | memoryview]:
    """The bytes of a file of these arrays, in pieces; the dtypes are little-endian integers."""
    places, pieces, offset = {}, list[bytes | memoryview](), 0
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array)
        places[name] = (flat.dtype.str, flat.shape, offset)
        padding = -flat.nbytes % _ALIGNMENT
        pieces += [flat.reshape(-1).view(np.uint8).data, bytes(padding)]
        offset += flat.nbytes + padding
    table = json.dumps({"told": told, "arrays": places}, separators=(",", ":")).encode()
    preface = _PREFACE.pack(_MAGIC, _VERSION, len(table)) + table
    return [preface.ljust(_aligned(len(preface)), b"\0"), *pieces]


def write(path: str, pieces: Sequence[bytes | memoryview]) -> None:
    """Write the file; it appears whole or not at all."""
    partial = f"{path}.partial-{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            file.writelines(pieces)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def table_of(path: str) -> Table:
    """The head of a file, with one small read; SampleError if `write` has not written it, or if it is cut."""
    with open(path, "rb", buffering=0) as file:
        return _table_in(file.fileno(), path)


def opened(path: str) -> Arrays:
    """The arrays of a file, mapped: nothing is read before it is asked for."""
    with open(path, "rb", buffering=0) as file:
        table = _table_in(file.fileno(), path)
        return _views(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), table, path)


def held(data: bytes, name: str) -> Arrays:
    """The arrays of a file that was read whole, as views of it; `name` is what errors call it."""
    return _views(data, _parsed(data, lambda: b"", name), name)


def narrowed(array: NDArray[Any]) -> NDArray[Any]:
    """The array in the smallest unsigned dtype that holds its values, at least uint16."""
    most = int(array.max(initial=0))
    dtype = next(dtype for dtype in ("<u2", "<u4", "<u8") if most <= np.iinfo(dtype).max)
    return array.astype(dtype)


def _table_in(fd: int, path: str) -> Table:
    begin = os.pread(fd, _GLANCE_NBYTES, 0)
    table = _parsed(begin, lambda: os.pread(fd, 1 << 30, len(begin)), path)
    found = os.fstat(fd).st_size
    if found < table.nbytes:
        raise SampleError(f"{path} is truncated: it has {found:,} bytes, its table wants {table.nbytes:,}")
    return table


def _parsed(begin: bytes, more: Any, path: str) -> Table:
    """The table at the beginning of a file; `more()` gives the rest of it, if it goes on after `begin`."""
    if len(begin) < _PREFACE.size or not begin.startswith(_MAGIC):
        raise SampleError(f"{path} is not a file of feedline's arrays")
    _, version, nbytes = _PREFACE.unpack_from(begin)
    if version != _VERSION:
        raise SampleError(f"{path} has version {version} of the format; this feedline reads {_VERSION}")
    stop = _PREFACE.size + nbytes
    text = begin[_PREFACE.size : stop] if stop <= len(begin) else (begin + more())[_PREFACE.size : stop]
    try:
        table = json.loads(text)
        arrays = {name: _checked(*place) for name, place in table["arrays"].items()}
        return Table(table["told"], arrays, _aligned(stop))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SampleError(f"{path} is damaged: its table cannot be read ({error})") from error


def _checked(dtype: str, shape: list[int], offset: int) -> tuple[str, tuple[int, ...], int]:
    whole = all(type(number) is int and number >= 0 for number in (offset, *shape))
    if dtype not in _DTYPES or not whole or offset % _ALIGNMENT:
        raise ValueError(f"an array of {dtype} and shape {shape} at {offset}")
    return dtype, tuple(shape), offset


def _views(buffer: Any, table: Table, path: str) -> Arrays:
    if len(buffer) < table.nbytes:
        raise SampleError(f"{path} is truncated: it has {len(buffer):,} bytes, its table wants {table.nbytes:,}")
    return Arrays(
        table.told,
        {
            name: np.frombuffer(buffer, dtype, prod(shape), table.data + offset).reshape(shape)
            for name, (dtype, shape, offset) in table.arrays.items()
        },
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
