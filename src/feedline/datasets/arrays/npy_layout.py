"""Layouts of array files, and memory maps of local ones.

A layout comes from the `.npy` header or from `Raw`, and is checked against the size of the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from feedline.core.paths import expand_user, missing
from feedline.core.tensors import torch_dtype
from feedline.errors import ArgumentError, SampleError, StateError
from feedline.stores.local import RecheckTimer

Pathlike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Raw:
    """File of bare numbers: rows of `row_shape` after `offset` bytes.

    The number of rows follows from the size of the file.
    """

    path: Pathlike
    dtype: DTypeLike
    row_shape: tuple[int, ...] = ()
    offset: int = 0


class NpyLayout(NamedTuple):
    """Dtype, shape, order and byte offset of a file's array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int


class RowSpan(NamedTuple):
    """Rows [start, stop) of one file, by its number."""

    file: int
    start: int
    stop: int


class MappedFiles:
    """Memory-mapped array files, by absolute path.

    Pickles by path, never by content; maps the files again on first use. The constructor opens every file, so that
    damage shows at once. Safe to use from several threads.
    """

    def __init__(self, sources: Sequence[Pathlike | Raw]) -> None:
        self._sources = [_absolute(source) for source in sources]
        self._arrays: list[NDArray[Any]] | None = None
        self._looks, self._nbytes = RecheckTimer(), list[int]()
        self._lengths: list[int] | None = None
        self._lengths = [len(array) for array in self.arrays]

    @property
    def paths(self) -> list[str]:
        """Absolute path of each file."""
        return [path_of(source) for source in self._sources]

    @property
    def lengths(self) -> list[int]:
        """Number of rows of each file."""
        return [len(array) for array in self.arrays]

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """Dtype of each file."""
        return [array.dtype for array in self.arrays]

    @property
    def ndims(self) -> list[int]:
        """Number of dimensions of each file."""
        return [array.ndim for array in self.arrays]

    def read(self, spans: Sequence[RowSpan]) -> list[NDArray[Any]]:
        """Rows of the files, as views of the maps."""
        arrays = self.arrays
        return [arrays[file][start:stop] for file, start, stop in spans]

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """Read-only contents of the files; StateError names one whose length has changed."""
        arrays = self._arrays
        if arrays is None:
            arrays = [open_array(source) for source in self._sources]
            self._check_lengths(arrays)
            self._nbytes = [os.stat(path).st_size for path in self.paths]  # noqa: PTH116 - as below
            self._arrays = arrays  # two threads may both open the files; either result is valid
        self.check_not_truncated()
        return arrays

    def check_not_truncated(self) -> None:
        """StateError if a mapped file has been truncated.

        Reading a page beyond the end of a mapped file would kill the process with SIGBUS.
        """
        if self._arrays is None or not self._looks.due():
            return
        for path, nbytes in zip(self.paths, self._nbytes, strict=True):
            with suppress(FileNotFoundError):  # a deleted file stays mapped
                if os.stat(path).st_size < nbytes:  # noqa: PTH116 - called often
                    raise StateError(f"{path} was truncated while it was read; restore it, and re-create the dataset")
        self._looks.done()

    def _check_lengths(self, arrays: Sequence[NDArray[Any]]) -> None:
        for path, was, array in zip(self.paths, self._lengths or (), arrays, strict=False):
            if was != len(array):
                raise StateError(
                    f"{path} had {was} rows when this dataset was created, and has {len(array)} now; re-create the"
                    " dataset"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}


def path_of(source: Pathlike | Raw) -> str:
    """Path or address of a source."""
    return os.fspath(source.path if isinstance(source, Raw) else source)


def _absolute(source: Pathlike | Raw) -> str | Raw:
    path = str(Path(expand_user(path_of(source))).resolve())  # workers may have another working directory
    return replace(source, path=path) if isinstance(source, Raw) else path


def open_array(source: Pathlike | Raw) -> NDArray[Any]:
    """Array of a `.npy` file or a `Raw`, memory-mapped read-only.

    The first dimension counts samples.
    """
    path = path_of(source)
    try:
        with open(path, "rb") as file:
            layout = layout_of(source, path, file, os.fstat(file.fileno()).st_size)
    except (FileNotFoundError, NotADirectoryError):
        raise missing(path) from None
    if 0 in layout.shape:
        return np.empty(layout.shape, layout.dtype)  # nothing to map
    order = "F" if layout.fortran else "C"
    mapped = np.memmap(path, layout.dtype, "r", layout.offset, layout.shape, order)  # type: ignore[call-overload]
    array: NDArray[Any] = mapped.view(np.ndarray)  # slices of np.memmap are several times slower
    return array


def layout_of(source: Pathlike | Raw, path: str, file: BinaryIO, nbytes: int) -> NpyLayout:
    """Layout of a file, from its first bytes and its size.

    `file` holds at least the header. Errors call the file `path`. SampleError for damaged files, ArgumentError for
    dtypes that torch lacks.
    """
    layout = _raw_layout(source, path, nbytes) if isinstance(source, Raw) else _npy_layout(path, file, nbytes)
    _check_dtype(layout.dtype, path)
    return layout


def _npy_layout(path: str, file: BinaryIO, nbytes: int) -> NpyLayout:
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, TypeError, SyntaxError, RecursionError, TokenError) as error:  # the header is a Python literal
        raise SampleError(f"{path} is not a .npy file ({error}); {_advice(file)}") from error
    offset = file.tell()
    if min(shape, default=0) < 0:
        raise SampleError(f"{path} is damaged: its header claims the shape {shape}; write it again")
    if not shape:
        raise SampleError(f"{path} holds a single number; the first dimension of an array counts its samples")
    wanted = offset + prod(shape) * dtype.itemsize
    if nbytes < wanted:
        raise SampleError(f"{path} is truncated: the file has {nbytes} bytes, its header requires {wanted}")
    return NpyLayout(dtype, shape, fortran, offset)


def _advice(file: BinaryIO) -> str:
    file.seek(0)
    if file.read(2) == b"PK":
        return "it is a .npz archive: unzip it, and pass the .npy files in it"
    return "pass a file of bare numbers as Raw(path, dtype)"


def _raw_layout(raw: Raw, path: str, file_nbytes: int) -> NpyLayout:
    dtype = np.dtype(raw.dtype)
    row_nbytes = prod(raw.row_shape) * dtype.itemsize
    if row_nbytes <= 0 or raw.offset < 0:
        raise ArgumentError(
            f"Raw({path!r}) describes rows of {raw.row_shape} {dtype} at offset {raw.offset}: a row must have at least"
            " one byte, and the offset must not be negative"
        )
    nbytes = file_nbytes - raw.offset
    if nbytes < 0 or nbytes % row_nbytes:
        raise SampleError(
            f"{path} does not fit its Raw(...): the file has {file_nbytes} bytes, which is not {raw.offset} plus a"
            f" multiple of the {row_nbytes} bytes of a row of {raw.row_shape} {dtype}"
        )
    return NpyLayout(dtype, (nbytes // row_nbytes, *raw.row_shape), False, raw.offset)


def _check_dtype(dtype: np.dtype[Any], path: str) -> None:
    if torch_dtype(dtype.newbyteorder("=")) is None:
        raise ArgumentError(f"{path} holds {dtype}, which torch does not support; convert it with astype")
