"""Rows of arrays that are stored in chunks: read chunk by chunk, the last chunks kept decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import _kernels
from feedline.datasets.decoding import DAMAGE
from feedline.datasets.once import OnceCache
from feedline.errors import SampleError
from feedline.rows import Empty, numpy_view, torch_dtype, torch_empty

ReadRows = Callable[[int, int], NDArray[Any]]
ChunkCache = OnceCache[tuple[str, int], NDArray[Any]]


class Shape(NamedTuple):
    """What is known of a stored array before any of it is read.

    `dtype` is None for texts and rows of any length; `chunk` is how many rows are read together, 1 where any row costs
    the same.
    """

    name: str
    length: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    chunk: int


class Rows(Protocol):
    """The rows of one array, in one process."""

    def each(self, places: NDArray[np.int64]) -> list[Any]: ...
    def take(self, places: NDArray[np.int64], empty: Empty) -> torch.Tensor: ...


class MappedRows:
    """Rows of an array in mapped memory."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self._dtype = torch_dtype(array.dtype)

    def each(self, places: NDArray[np.int64]) -> list[Any]:
        """The rows, as tensors that share memory with each other only."""
        return list(self.take(places, torch_empty).unbind())

    def take(self, places: NDArray[np.int64], empty: Empty) -> torch.Tensor:
        """The rows as one tensor, in memory from `empty`."""
        assert self._dtype is not None
        out = empty((len(places), *self._array.shape[1:]), self._dtype)
        _kernels.gather_rows(self._array, places, out=numpy_view(out))
        return out


class ChunkedRows:
    """Rows that `read(start, stop)` gives: whole chunks, of which `cache` keeps the last ones."""

    def __init__(self, path: str, shape: Shape, read: ReadRows, cache: ChunkCache) -> None:
        self._path, self._shape, self._read, self._cache = path, shape, read, cache

    def each(self, places: NDArray[np.int64]) -> list[Any]:
        """The rows: tensors that share memory with each other only, or what the array holds in place of numbers."""
        if self._shape.dtype is not None:
            return list(self.take(places, torch_empty).unbind())
        found: list[Any] = [None] * len(places)
        for rows, chunk, local in self._visits(places):
            for row, at in zip(rows.tolist(), local.tolist(), strict=True):
                found[row] = _as_sample(chunk[at])
        return found

    def take(self, places: NDArray[np.int64], empty: Empty) -> torch.Tensor:
        """The rows as one tensor, in memory from `empty`."""
        assert self._shape.dtype is not None
        dtype = torch_dtype(self._shape.dtype)
        assert dtype is not None
        out = empty((len(places), *self._shape.row_shape), dtype)
        array = numpy_view(out)
        for rows, chunk, local in self._visits(places):
            array[rows] = chunk[local]
        return out

    def _visits(self, places: NDArray[np.int64]) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """For each chunk that is needed: which rows of the batch are in it, the chunk, and their places in it."""
        chunks = places // self._shape.chunk
        order = np.argsort(chunks, kind="stable")
        borders = np.flatnonzero(np.diff(chunks[order])) + 1
        for rows in np.split(order, borders) if len(order) else ():
            number = int(chunks[rows[0]])
            start, array = self._chunk(number, places[rows])
            yield rows, array, places[rows] - start

    def _chunk(self, number: int, needed: NDArray[np.int64]) -> tuple[int, NDArray[Any]]:
        """The chunk and its first row; of one that is too large to be kept, the part that is needed now."""
        start = number * self._shape.chunk
        stop = min(start + self._shape.chunk, self._shape.length)
        if (stop - start) * self._row_nbytes() > self._cache.limit_nbytes:
            start, stop = int(needed.min()), int(needed.max()) + 1
            return start, self._rows(start, stop)
        return start, self._cache.get((self._shape.name, number), partial(self._rows, start, stop))

    def _rows(self, start: int, stop: int) -> NDArray[Any]:
        try:
            array = self._read(start, stop)
        except (*DAMAGE, RuntimeError) as error:  # codecs raise what they like
            raise SampleError(
                f"rows {start} to {stop - 1} of {self._shape.name!r} in {self._path} cannot be read"
                f" ({type(error).__name__}: {error}); the chunk is damaged: restore the file, or pass"
                " on_error='skip' to the loader"
            ) from error
        return array if self._shape.dtype is None else array.astype(self._shape.dtype, copy=False)

    def _row_nbytes(self) -> int:
        itemsize = 8 if self._shape.dtype is None else self._shape.dtype.itemsize
        return int(np.prod(self._shape.row_shape, dtype=np.int64)) * itemsize


def _as_sample(value: Any) -> Any:
    """A row that is not a row of numbers: a text, bytes, or an array of any length."""
    if isinstance(value, np.ndarray) and torch_dtype(value.dtype) is not None:
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value
