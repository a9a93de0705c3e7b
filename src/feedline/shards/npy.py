"""Arrays in the `.npy` format that lie in a larger file: seen where they are, without a copy."""

from __future__ import annotations

import io
from functools import lru_cache
from math import prod
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_MAGIC = b"\x93NUMPY"


class Layout(NamedTuple):
    """What the header of a `.npy` file says, and where the numbers begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int


def is_array(data: bytes | memoryview) -> bool:
    """Whether data begin as a `.npy` array does."""
    return data[:6] == _MAGIC


def layout(data: memoryview, nbytes: int | None = None) -> Layout:
    """The layout of an array; ValueError for what is none, holds Python objects, or is shorter than it says.

    `data` may be its beginning only, if `nbytes` tells how long it is.
    """
    found = len(data) if nbytes is None else nbytes
    if len(data) < 12 or not is_array(data):
        raise ValueError("not a .npy array")
    header = 10 + int.from_bytes(data[8:10], "little") if data[6] == 1 else 12 + int.from_bytes(data[8:12], "little")
    told = _parsed(bytes(data[: min(header, len(data))]))
    if min(told.shape, default=0) < 0:
        raise ValueError(f"the header of the .npy array claims the shape {told.shape}")
    wanted = told.offset + prod(told.shape) * told.dtype.itemsize
    if found < wanted:
        raise ValueError(f"the .npy array is truncated: {found:,} bytes, its header wants {wanted:,}")
    return told


def array(data: memoryview) -> NDArray[Any]:
    """The array: a read-only view of `data`, valid as long as that is."""
    told = layout(data)
    flat: NDArray[Any] = np.frombuffer(data, told.dtype, prod(told.shape), told.offset)
    return flat.reshape(told.shape, order="F" if told.fortran else "C")


@lru_cache(maxsize=4096)  # pictures of one shape have one header
def _parsed(header: bytes) -> Layout:
    file = io.BytesIO(header)
    version = npy.read_magic(file)
    try:
        shape, fortran, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
    except (SyntaxError, RecursionError, TokenError, TypeError) as error:  # it is a Python literal
        raise ValueError(f"the header of the .npy array is damaged ({error})") from error
    if dtype.hasobject:
        raise ValueError("the .npy array holds Python objects, which only pickle could read; save it as numbers")
    return Layout(dtype, shape, fortran, file.tell())
