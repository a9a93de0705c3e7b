"""Array files, memory-mapped: what a header or the caller says is in them, checked against what is."""

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
    """A file of bare numbers: rows of `row_shape`, after `offset` bytes; their number follows from the file's size."""

    path: Pathlike
    dtype: DTypeLike
    row_shape: tuple[int, ...] = ()
    offset: int = 0


class NpyLayout(NamedTuple):
    """How the array of a file lies in it: its items from `offset` on, the last dimension first if `fortran`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int


class RowSpan(NamedTuple):
    """The rows from `start` up to `stop` of the file with this number."""

    file: int
    start: int
    stop: int


class MappedFiles:
    """Array files by absolute path, memory-mapped; pickled by path, never by content, and opened again on first use.

    The constructor opens every file, so that damage shows at once. Safe to use from several threads.
    """

    def __init__(self, sources: Sequence[Pathlike | Raw]) -> None:
        self._sources = [_absolute(source) for source in sources]
        self._arrays: list[NDArray[Any]] | None = None
        self._looks, self._nbytes = RecheckTimer(), list[int]()
        self._lengths: list[int] | None = None
        self._lengths = [len(array) for array in self.arrays]

    @property
    def paths(self) -> list[str]:
        """The path of each file."""
        return [path_of(source) for source in self._sources]

    @property
    def lengths(self) -> list[int]:
        """The rows of each file."""
        return [len(array) for array in self.arrays]

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """The dtype of each file."""
        return [array.dtype for array in self.arrays]

    @property
    def ndims(self) -> list[int]:
        """The dimensions of each file."""
        return [array.ndim for array in self.arrays]

    def read(self, spans: Sequence[RowSpan]) -> list[NDArray[Any]]:
        """Rows of the files, as views of them."""
        arrays = self.arrays
        return [arrays[file][start:stop] for file, start, stop in spans]

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """The contents of the files, read-only; StateError names a file whose length is not what it was."""
        arrays = self._arrays
        if arrays is None:
            arrays = [opened(source) for source in self._sources]
            self._refuse_changed(arrays)
            self._nbytes = [os.stat(path).st_size for path in self.paths]  # noqa: PTH116 - as below
            self._arrays = arrays  # two threads may both have opened the files: either result serves
        self.refuse_cut()
        return arrays

    def refuse_cut(self) -> None:
        """StateError if a file has become shorter than what is mapped of it: to touch that would end the process."""
        if self._arrays is None or not self._looks.due():
            return
        for path, nbytes in zip(self.paths, self._nbytes, strict=True):
            with suppress(FileNotFoundError):  # what was mapped stays when its name goes
                if os.stat(path).st_size < nbytes:  # noqa: PTH116 - often
                    raise StateError(f"{path} was cut short while it was read; restore it, and make the dataset anew")
        self._looks.done()

    def _refuse_changed(self, arrays: Sequence[NDArray[Any]]) -> None:
        for path, was, array in zip(self.paths, self._lengths or (), arrays, strict=False):
            if was != len(array):
                raise StateError(f"{path} had {was} rows when this dataset was made, and has {len(array)} now")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}


def path_of(source: Pathlike | Raw) -> str:
    """Where the source lies."""
    return os.fspath(source.path if isinstance(source, Raw) else source)


def _absolute(source: Pathlike | Raw) -> str | Raw:
    path = str(Path(expand_user(path_of(source))).resolve())  # workers may have another working directory
    return replace(source, path=path) if isinstance(source, Raw) else path


def opened(source: Pathlike | Raw) -> NDArray[Any]:
    """The array in a `.npy` file or a `Raw` one, memory-mapped read-only; the first dimension counts samples."""
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
    array: NDArray[Any] = mapped.view(np.ndarray)  # the subclass makes every slice several times dearer
    return array


def layout_of(source: Pathlike | Raw, path: str, file: BinaryIO, nbytes: int) -> NpyLayout:
    """The layout of a file that begins like `file` and has `nbytes`; errors name it `path`."""
    layout = _raw_layout(source, path, nbytes) if isinstance(source, Raw) else _npy_layout(path, file, nbytes)
    _refuse_foreign(layout.dtype, path)
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
        raise SampleError(f"{path} is damaged: its header claims the shape {shape}; write it anew")
    if not shape:
        raise SampleError(f"{path} holds a single number; the first dimension of an array counts its samples")
    wanted = offset + prod(shape) * dtype.itemsize
    if nbytes < wanted:
        raise SampleError(f"{path} is truncated: the file has {nbytes} bytes, its header wants {wanted}")
    return NpyLayout(dtype, shape, fortran, offset)


def _advice(file: BinaryIO) -> str:
    file.seek(0)
    if file.read(2) == b"PK":
        return "it is a .npz archive: unzip it, and give the .npy files that were in it"
    return "give bare numbers as Raw(path, dtype)"


def _raw_layout(raw: Raw, path: str, found: int) -> NpyLayout:
    dtype = np.dtype(raw.dtype)
    row_nbytes = prod(raw.row_shape) * dtype.itemsize
    if row_nbytes <= 0 or raw.offset < 0:
        raise ArgumentError(f"rows of {raw.row_shape} {dtype} at offset {raw.offset} of {path} cannot be")
    nbytes = found - raw.offset
    if nbytes < 0 or nbytes % row_nbytes:
        raise SampleError(
            f"{path} does not fit: the file has {found} bytes, which is not {raw.offset} and a multiple "
            f"of the {row_nbytes} bytes of a row of {raw.row_shape} {dtype}"
        )
    return NpyLayout(dtype, (nbytes // row_nbytes, *raw.row_shape), False, raw.offset)


def _refuse_foreign(dtype: np.dtype[Any], path: str) -> None:
    if torch_dtype(dtype.newbyteorder("=")) is None:
        raise ArgumentError(f"{path} holds {dtype}, which no tensor can hold; convert it with astype")
