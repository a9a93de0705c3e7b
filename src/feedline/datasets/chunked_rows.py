"""Rows of arrays that are stored in chunks: read chunk by chunk, the last chunks kept decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import _kernels
from feedline.datasets.decoding import DAMAGE
from feedline.datasets.once import OnceCache
from feedline.errors import SampleError
from feedline.rows import torch_dtype
from feedline.stores import CachedStore, StoreError, Want
from feedline.stores.protocol import Range

ReadRows = Callable[[Sequence[Range]], Iterator[NDArray[Any]]]
"""The rows of each span, from its start up to its stop, one after the other; what they need may come all at once."""
Wanting = Callable[[Sequence[Range]], list[tuple[CachedStore, Want]]]
"""What a prefetch has to bring into a cache for these spans of rows."""
ChunkCache = OnceCache[tuple[str, int], NDArray[Any]]

_TOGETHER_NBYTES = 256 << 20
_TOGETHER = 256


class Lies(Protocol):
    """Where in its file an array lies."""

    def spans(self, start: int, stop: int) -> list[Range]:
        """The bytes that hold the rows from `start` up to `stop`, and what is stored in one piece with them."""
        ...


class Shape(NamedTuple):
    """What is known of a stored array before any of it is read.

    `dtype` is None for texts and rows of any length; `chunk` is how many rows are read together, 1 where any row costs
    the same. `lies` is known of arrays in one remote object.
    """

    name: str
    length: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    chunk: int
    lies: Lies | None = None


class Rows(Protocol):
    """The rows of one array of numbers, in one process."""

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Write the rows at these places into those of `out`."""
        ...

    def wants(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        """What a prefetch has to bring into a cache for these rows."""
        ...


class MappedRows:
    """Rows of an array in mapped memory."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        _kernels.gather_rows(self._array, places, out=out)

    def wants(self, _: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        return []


class _Part(NamedTuple):
    """Rows that are read together: a chunk, or of one that is too large to be kept, the part that is needed now."""

    number: int
    start: int
    stop: int
    kept: bool


class ChunkedRows:
    """Rows that `read` gives: whole chunks, of which `cache` keeps the last ones.

    With `wanting`, chunks are far away, and as many as memory allows are read together.
    """

    def __init__(
        self, path: str, shape: Shape, read: ReadRows, cache: ChunkCache, wanting: Wanting | None = None
    ) -> None:
        self._path, self._shape, self._read, self._cache = path, shape, read, cache
        self._wanting = wanting
        self._together = 1
        if wanting is not None:
            self._together = min(_TOGETHER, max(1, _TOGETHER_NBYTES // max(1, shape.chunk * self._row_nbytes())))

    def each(self, places: NDArray[np.int64]) -> list[Any]:
        """Of an array that holds no numbers: texts, or tensors of any length."""
        found: list[Any] = [None] * len(places)
        for rows, chunk, local in self._visits(places):
            for row, at in zip(rows.tolist(), local.tolist(), strict=True):
                found[row] = _as_sample(chunk[at])
        return found

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        for rows, chunk, local in self._visits(places):
            out[rows] = chunk[local]

    def wants(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        if self._wanting is None:
            return []
        parts = [self._part(places[rows]) for rows in self._by_chunk(places)]
        return self._wanting([(part.start, part.stop) for part in parts if not self._is_kept(part)])

    def _visits(self, places: NDArray[np.int64]) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """For each chunk that is needed: which rows of the batch are in it, the chunk, and their places in it."""
        by_chunk = self._by_chunk(places)
        for first in range(0, len(by_chunk), self._together):
            several = by_chunk[first : first + self._together]
            parts = [self._part(places[rows]) for rows in several]
            for rows, part, array in zip(several, parts, self._arrays(parts), strict=True):
                yield rows, array, places[rows] - part.start

    def _by_chunk(self, places: NDArray[np.int64]) -> list[NDArray[Any]]:
        chunks = places // self._shape.chunk
        order = np.argsort(chunks, kind="stable")
        borders = np.flatnonzero(np.diff(chunks[order])) + 1
        return np.split(order, borders) if len(order) else []

    def _part(self, needed: NDArray[np.int64]) -> _Part:
        number = int(needed[0]) // self._shape.chunk
        start = number * self._shape.chunk
        stop = min(start + self._shape.chunk, self._shape.length)
        if (stop - start) * self._row_nbytes() > self._cache.limit_nbytes:
            return _Part(number, int(needed.min()), int(needed.max()) + 1, kept=False)
        return _Part(number, start, stop, kept=True)

    def _is_kept(self, part: _Part) -> bool:
        return part.kept and (self._shape.name, part.number) in self._cache

    def _arrays(self, parts: Sequence[_Part]) -> Iterator[NDArray[Any]]:
        missing = [part for part in parts if not self._is_kept(part)]
        # A single one is left to the cache, which reads it once for all threads.
        together = set(missing) if len(missing) > 1 else set()
        read = self._rows(missing)
        for part in parts:
            one = iter([next(read)]) if part in together else self._rows([part])
            yield self._cache.get((self._shape.name, part.number), partial(next, one)) if part.kept else next(one)

    def _rows(self, parts: Sequence[_Part]) -> Iterator[NDArray[Any]]:
        read = self._read([(part.start, part.stop) for part in parts])
        for part in parts:
            array = self._checked(part, read)
            yield array if self._shape.dtype is None else array.astype(self._shape.dtype, copy=False)

    def _checked(self, part: _Part, read: Iterator[NDArray[Any]]) -> NDArray[Any]:
        try:
            return next(read)
        except StoreError:
            raise
        except (*DAMAGE, RuntimeError) as error:  # codecs raise what they like
            raise SampleError(
                f"rows {part.start} to {part.stop - 1} of {self._shape.name!r} in {self._path} cannot be read"
                f" ({type(error).__name__}: {error}); the chunk is damaged: restore the file, or pass"
                " on_error='skip' to the loader"
            ) from error

    def _row_nbytes(self) -> int:
        itemsize = 8 if self._shape.dtype is None else self._shape.dtype.itemsize
        return int(np.prod(self._shape.row_shape, dtype=np.int64)) * itemsize


def _as_sample(value: Any) -> Any:
    """A row that is not a row of numbers: a text, bytes, or an array of any length."""
    if isinstance(value, np.ndarray) and torch_dtype(value.dtype) is not None:
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value
