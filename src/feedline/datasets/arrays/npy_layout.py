"""Layouts of array files.

A layout comes from the `.npy` header or from `Raw`, and is checked against the size of the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import BytesIO
from math import prod
from tokenize import TokenError
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike

from feedline.core.paths import Pathlike
from feedline.core.tensors import torch_dtype
from feedline.datasets.arrays.records import delivered_dtype
from feedline.datasets.arrays.rows import ArrayLayout
from feedline.datasets.signatures import BEGIN_NBYTES, recognize
from feedline.errors import ArgumentError, SampleError


@dataclass(frozen=True, slots=True)
class Raw:
    """File of bare numbers: rows of `row_shape` after `offset` bytes.

    The number of rows follows from the size of the file.
    """

    path: Pathlike
    dtype: DTypeLike
    row_shape: tuple[int, ...] = ()
    offset: int = 0


class NpzMember(NamedTuple):
    """Bytes of a `.npy` file that is stored in a `.npz` archive."""

    path: str
    name: str
    start: int
    nbytes: int

    @property
    def label(self) -> str:
        """Name of the array in messages."""
        return f"{self.name!r} in {self.path}"


NpySource = Pathlike | Raw | NpzMember
"""Array of a file."""


def path_of(source: NpySource) -> str:
    """Path or address of a source."""
    return os.fspath(source.path if isinstance(source, (Raw, NpzMember)) else source)


def layout_of(source: NpySource, path: str, file: BinaryIO, nbytes: int) -> ArrayLayout:
    """Layout of a file, from its first bytes and its size.

    `file` holds at least the header. Errors name the file by `path`. SampleError for damaged files, ArgumentError for
    dtypes that torch lacks.
    """
    if isinstance(source, NpzMember):
        inner = layout_of(source.name, source.label, file, source.nbytes)
        return inner._replace(offset=inner.offset + source.start)
    return _raw_layout(source, path, nbytes) if isinstance(source, Raw) else _npy_layout(path, file, nbytes)


def _npy_layout(path: str, file: BinaryIO, nbytes: int) -> ArrayLayout:
    try:
        shape, fortran, dtype = _read_header(file)
    except (ValueError, TypeError, SyntaxError, RecursionError, TokenError) as error:  # the header is a Python literal
        raise SampleError(f"{path} is not a .npy file ({error}); {_advice(file)}") from error
    _check_dtype(dtype, path)  # checked first, because objects are pickled and have other numbers of bytes
    offset = file.tell()
    if min(shape, default=0) < 0:
        raise SampleError(f"{path} is damaged: its header claims the shape {shape}; write it again")
    if not shape:
        raise SampleError(f"{path} holds a single number; the first dimension of an array counts its samples")
    wanted = offset + prod(shape) * dtype.itemsize
    if nbytes < wanted:
        raise SampleError(f"{path} is truncated: the file has {nbytes} bytes, its header requires {wanted}")
    return ArrayLayout(dtype, shape, fortran, offset)


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    if version == (1, 0):
        return npy.read_array_header_1_0(file)
    return npy.read_array_header_2_0(_as_version_2(file) if version == (3, 0) else file)


def _as_version_2(file: BinaryIO) -> BinaryIO:
    """Convert a header of version 3 to version 2.

    NumPy has no public function for version 3. Only the encoding of names differs: UTF-8 instead of Latin-1.
    """
    text = file.read(int.from_bytes(file.read(4), "little")).decode()
    header = text.encode("latin-1", "backslashreplace")
    return BytesIO(len(header).to_bytes(4, "little") + header)


def _advice(file: BinaryIO) -> str:
    file.seek(0)
    begin = file.read(BEGIN_NBYTES)
    found = recognize(begin)
    if found is not None and (found.also or not begin.startswith(b"PK")):
        return f"it is {found.what}: {found.remedy}"
    if begin.startswith(b"PK"):
        return "it is a .npz archive: pass it alone, with a name that ends in .npz, and name its arrays with columns="
    return "pass a file of bare numbers as Raw(path, dtype)"


def _raw_layout(raw: Raw, path: str, file_nbytes: int) -> ArrayLayout:
    dtype = np.dtype(raw.dtype)
    _check_dtype(dtype, path)
    row_nbytes = prod(raw.row_shape) * dtype.itemsize
    if row_nbytes <= 0 or raw.offset < 0:
        raise ArgumentError(
            f"Raw({path!r}) describes rows of {raw.row_shape} {dtype} at offset {raw.offset}: a row must have at least"
            " one byte, and the offset must not be negative"
        )
    nbytes = file_nbytes - raw.offset
    if nbytes < 0 or nbytes % row_nbytes:
        raise SampleError(
            f"{path} does not fit: the file has {file_nbytes} bytes, which is not {raw.offset} plus a"
            f" multiple of the {row_nbytes} bytes of a row of {raw.row_shape} {dtype}"
        )
    return ArrayLayout(dtype, (nbytes // row_nbytes, *raw.row_shape), False, raw.offset)


def _check_dtype(dtype: np.dtype[Any], path: str) -> None:
    try:
        delivered = delivered_dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"{path} holds {error}, which torch does not support; convert it with astype") from None
    if delivered.names is None and torch_dtype(delivered) is None:
        raise ArgumentError(f"{path} holds {dtype}, which torch does not support; convert it with astype")
