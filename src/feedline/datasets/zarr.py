"""`Zarr`: rows of the arrays in a Zarr store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from feedline import extras
from feedline.datasets.arrays import Transform
from feedline.datasets.chunked_rows import ChunkCache, ChunkedRows, ReadRows, Rows, Shape
from feedline.datasets.decoding import DAMAGE
from feedline.datasets.files import Pathlike
from feedline.datasets.stored_arrays import Names, StoredArrays, refuse_changed
from feedline.errors import ArgumentError, SampleError
from feedline.rows import torch_dtype


class Zarr(StoredArrays):
    """Rows along the first axis of arrays in a Zarr store, version 2 or 3, a folder or a `.zip`.

    `names` is one name, a sequence, or names by key; None is every array at the top, or the store itself where it is
    an array. Chunks (with sharding, shards) are decoded whole, and the last `cache_nbytes` of them kept. Each process
    opens the store for itself, on first use. Numbers become tensors, strings texts.
    """

    def __init__(
        self, path: Pathlike, names: Names = None, *, transform: Transform | None = None, cache_nbytes: int = 1 << 26
    ) -> None:
        super().__init__(path, names, transform, cache_nbytes)

    @staticmethod
    def _everything(path: str) -> Names:
        node = _node(path)
        return "" if isinstance(node, _library().Array) else {name: name for name in sorted(node.array_keys())}

    @staticmethod
    def _described(path: str, names: Sequence[str]) -> list[Shape]:
        return [_shape(_array(path, name), name, path) for name in names]

    @staticmethod
    def _open_rows(path: str, shapes: Sequence[Shape], cache: ChunkCache) -> list[Rows]:
        rows: list[Rows] = []
        for shape in shapes:
            array = _array(path, shape.name)
            refuse_changed(path, shape, array.shape[0], array.shape[1:])
            rows.append(ChunkedRows(path, shape, _reader(array), cache))
        return rows


def _library() -> Any:
    return extras.load("zarr", "zarr", "datasets.Zarr")


def _node(path: str) -> Any:
    """The group or array at the root of the store, for reading."""
    zarr = _library()
    if not Path(path).exists():
        raise FileNotFoundError(f"no such store: {path}")
    try:
        return zarr.open(zarr.storage.ZipStore(path, mode="r") if Path(path).is_file() else path, mode="r")
    except (*DAMAGE, RuntimeError, BadZipFile) as error:
        raise SampleError(
            f"{path} cannot be opened as a Zarr store ({type(error).__name__}: {error}); was it written to its end?"
        ) from error


def _array(path: str, name: str) -> Any:
    """An array of the store; "" is the store itself."""
    zarr, node = _library(), _node(path)
    is_array = isinstance(node, zarr.Array)
    if is_array and name == "":
        return node
    try:
        found = None if is_array else node[name]
    except KeyError:
        found = None
    if not isinstance(found, zarr.Array):
        there = ["itself (names=None)"] if is_array else sorted(node.array_keys())
        raise ArgumentError(f"{path} has no array {name!r}; it has {', '.join(there) or 'none'}")
    return found


def _shape(array: Any, name: str, path: str) -> Shape:
    if not array.shape:
        raise ArgumentError(f"{name!r} in {path} is a single value; the first axis of an array counts its samples")
    chunks = getattr(array, "shards", None) or array.chunks  # a shard is one file of several chunks
    return Shape(name, array.shape[0], array.shape[1:], _numbers(array, name, path), max(1, chunks[0]))


def _numbers(array: Any, name: str, path: str) -> np.dtype[Any] | None:
    """The dtype of rows of numbers, in the machine's byte order; None for strings."""
    dtype: np.dtype[Any] = np.dtype(array.dtype)
    if dtype.kind in "OTUS":
        return None
    native: np.dtype[Any] = dtype.newbyteorder("=")
    if torch_dtype(native) is None:
        raise ArgumentError(f"{name!r} in {path} holds {dtype}, which no tensor can hold; name other arrays")
    return native


def _reader(array: Any) -> ReadRows:
    def read(start: int, stop: int) -> NDArray[Any]:
        return np.asarray(array[start:stop])

    return read
