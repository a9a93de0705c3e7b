"""Rows of arrays that a library stores in chunks.

Rows are read chunk by chunk; each process caches the decoded chunks that it used last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.caches import LoadingCache
from feedline.core.stage_parts import DECODING, Part
from feedline.core.tensors import torch_dtype
from feedline.datasets.arrays.rows import RowSource
from feedline.datasets.compression import LZMAError
from feedline.datasets.decoding import DAMAGE
from feedline.errors import SampleError, StateError
from feedline.stores import CachedStore, ObjectRange, StoreError
from feedline.stores.base import Range, changed_error

ReadRows = Callable[[Sequence[Range]], Iterator[NDArray[Any]]]
"""Returns the rows of each span, one array per span, in order. The implementation may fetch all spans at once."""


PrefetchRanges = Callable[[Sequence[Range]], list[tuple[CachedStore, ObjectRange]]]
"""Returns the object ranges to prefetch into a cache for these spans of rows."""


ChunkCache = LoadingCache[tuple[str, int], NDArray[Any]]


_CHUNKS_AT_ONCE_NBYTES = 256 << 20
"""Most bytes of remote chunks that are decoded together, before their rows are copied."""


_CHUNKS_AT_ONCE = 256


class ByteLayout(Protocol):
    """Byte positions of an array's rows in its file."""

    def spans(self, start: int, stop: int) -> list[Range]:
        """Byte ranges needed to read the rows [start, stop).

        If rows are stored in chunks, a range may include other rows.
        """
        ...


class Shape(NamedTuple):
    """Metadata of a stored array, known before its rows are read.

    `dtype` is the dtype of the delivered rows, a structured dtype for records, and None for strings and rows of
    variable length. `chunk` is the number of rows that are read together, 1 where any row costs the same. `byte_layout`
    is set for an array within one remote object.
    """

    name: str
    length: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    chunk: int
    byte_layout: ByteLayout | None = None


class ArrayRows(Protocol):
    """Rows of one array of numbers, in one process."""

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Write the rows at `places` into `out`, in the order of `places`."""
        ...

    def ranges(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into a cache for these rows."""
        ...


class WholeRows:
    """Consecutive rows, in the order of an array."""

    def __init__(self, source: RowSource) -> None:
        self._source = source

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        self._source.fill(places, [out])

    def ranges(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        return self._source.row_ranges(places)


class _RowBlock(NamedTuple):
    """Rows that are read together.

    A whole chunk, or, if a chunk is too large for the cache (`is_cacheable` is False), the rows from the first to the
    last that are needed.
    """

    number: int
    start: int
    stop: int
    is_cacheable: bool


class ChunkedRows:
    """Rows of a chunked array, with a cache of decoded chunks.

    With `prefetch_ranges`, chunks are remote, and as many as memory allows are read at once. The time of `read` counts
    for `part`.
    """

    def __init__(
        self,
        path: str,
        shape: Shape,
        read: ReadRows,
        cache: ChunkCache,
        prefetch_ranges: PrefetchRanges | None = None,
        part: Part = DECODING,
    ) -> None:
        self._path, self._shape, self._read, self._cache, self._timed = path, shape, read, cache, part
        self._prefetch_ranges = prefetch_ranges
        self._at_once = 1
        if prefetch_ranges is not None:
            self._at_once = min(
                _CHUNKS_AT_ONCE, max(1, _CHUNKS_AT_ONCE_NBYTES // max(1, shape.chunk * self._row_nbytes()))
            )

    def each(self, places: NDArray[np.int64]) -> list[Any]:
        """Rows of an array without a numeric dtype: strings or ragged tensors."""
        samples: list[Any] = [None] * len(places)
        for rows, chunk, local in self._visits(places):
            for row, at in zip(rows.tolist(), local.tolist(), strict=True):
                samples[row] = _as_sample(chunk[at])
        return samples

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        for rows, chunk, local in self._visits(places):
            out[rows] = chunk[local]

    def ranges(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        if self._prefetch_ranges is None:
            return []
        parts = [self._part(places[rows]) for rows in self._by_chunk(places)]
        return self._prefetch_ranges([(part.start, part.stop) for part in parts if not self._is_cached(part)])

    def _visits(self, places: NDArray[np.int64]) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Visit the chunks that hold these places.

        Yields (rows of the batch, decoded chunk, rows within the chunk).
        """
        by_chunk = self._by_chunk(places)
        for first in range(0, len(by_chunk), self._at_once):
            several = by_chunk[first : first + self._at_once]
            parts = [self._part(places[rows]) for rows in several]
            for rows, part, array in zip(several, parts, self._arrays(parts), strict=True):
                yield rows, array, places[rows] - part.start

    def _by_chunk(self, places: NDArray[np.int64]) -> list[NDArray[Any]]:
        chunks = places // self._shape.chunk
        order = np.argsort(chunks, kind="stable")
        borders = np.flatnonzero(np.diff(chunks[order])) + 1
        return np.split(order, borders) if len(order) else []

    def _part(self, needed: NDArray[np.int64]) -> _RowBlock:
        number = int(needed[0]) // self._shape.chunk
        start = number * self._shape.chunk
        stop = min(start + self._shape.chunk, self._shape.length)
        if (stop - start) * self._row_nbytes() > self._cache.limit_nbytes:
            return _RowBlock(number, int(needed.min()), int(needed.max()) + 1, is_cacheable=False)
        return _RowBlock(number, start, stop, is_cacheable=True)

    def _is_cached(self, part: _RowBlock) -> bool:
        return part.is_cacheable and (self._shape.name, part.number) in self._cache

    def _arrays(self, parts: Sequence[_RowBlock]) -> Iterator[NDArray[Any]]:
        missing = [part for part in parts if not self._is_cached(part)]
        # A single missing chunk goes through the cache, which loads it once for all threads.
        together = set(missing) if len(missing) > 1 else set()
        read = self._rows(missing)
        for part in parts:
            one = iter([next(read)]) if part in together else self._rows([part])
            yield (
                self._cache.get((self._shape.name, part.number), partial(next, one)) if part.is_cacheable else next(one)
            )

    def _rows(self, parts: Sequence[_RowBlock]) -> Iterator[NDArray[Any]]:
        read = self._read([(part.start, part.stop) for part in parts])
        for part in parts:
            array = self._next_rows(part, read)
            yield array if self._shape.dtype is None else array.astype(self._shape.dtype, copy=False)

    def _next_rows(self, part: _RowBlock, read: Iterator[NDArray[Any]]) -> NDArray[Any]:
        try:
            with self._timed:  # reads from stores inside count as reads
                return next(read)
        except StoreError:
            raise
        except UnicodeDecodeError as error:
            raise SampleError(
                f"rows {part.start} to {part.stop - 1} of {self._shape.name!r} in {self._path} are not UTF-8 ({error});"
                " write bytes that are no texts as uint8, restore the file if it is damaged, or pass on_error='skip' to"
                " the loader"
            ) from error
        except (*DAMAGE, LZMAError, SystemError) as error:  # codecs raise exceptions of any of these types
            raise SampleError(
                f"rows {part.start} to {part.stop - 1} of {self._shape.name!r} in {self._path} cannot be read"
                f" ({type(error).__name__}: {error}); the chunk is damaged: restore the file, or pass"
                " on_error='skip' to the loader"
            ) from error

    def _row_nbytes(self) -> int:
        itemsize = 8 if self._shape.dtype is None else self._shape.dtype.itemsize
        return int(np.prod(self._shape.row_shape, dtype=np.int64)) * itemsize


def _as_sample(value: Any) -> Any:
    """Convert a row without a numeric dtype to a sample.

    Numeric arrays become tensors, NumPy scalars become Python's scalars.
    """
    if isinstance(value, np.ndarray) and torch_dtype(value.dtype) is not None:
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


class PartOfCache(LoadingCache[tuple[str, int], NDArray[Any]]):
    """One source's view of the chunk cache that all sources share.

    It prefixes keys with the source's number.
    """

    def __init__(self, whole: ChunkCache, number: int) -> None:
        super().__init__(whole.limit_nbytes)
        self._whole, self._number = whole, number

    def __contains__(self, key: object) -> bool:
        return self._key(key) in self._whole

    def get(self, key: tuple[str, int], make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Forward to the shared cache."""
        return self._whole.get(self._key(key), make)

    def _key(self, key: Any) -> tuple[str, int]:
        name, chunk = key
        return f"{self._number} {name}", chunk


Names = str | Sequence[str] | Mapping[str, str] | None


class ArraySource(Protocol):
    """Opens the file or store that holds the arrays; pickles by address."""

    @property
    def name(self) -> str:
        """Path or address."""
        ...

    @property
    def is_remote(self) -> bool:
        """True for a remote store, where arrays are read concurrently."""
        ...

    def all_names(self) -> Names:
        """Names of all arrays at the top level."""
        ...

    def shapes(self, names: Sequence[str]) -> list[Shape]:
        """Metadata of these arrays; ArgumentError names a missing one."""
        ...

    def rows(self, shapes: Sequence[Shape], cache: ChunkCache) -> list[ArrayRows | ChunkedRows]:
        """Readers of the rows in this process.

        StateError if an array has changed.
        """
        ...


def check_unchanged(path: str, was: Shape, length: int, row_shape: tuple[int, ...]) -> None:
    """Raise StateError if length or row shape have changed since construction."""
    if (length, row_shape) != (was.length, was.row_shape):
        difference = f"it had {was.length} rows of {was.row_shape}, and has {length} of {row_shape} now"
        raise changed_error(StateError, f"{was.name!r} in {path}", difference)
