"""Datasets of aligned arrays that a library stores in chunks.

`HDF5` and `Zarr` derive from `StoredArrays`. Rows are read chunk by chunk; each process keeps the chunks it used last,
decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import kernels
from feedline.core.caches import LoadingCache, PerProcess
from feedline.core.dataset import (
    READS_BATCHES,
    READS_SAMPLES,
    Batch,
    BatchRead,
    Traits,
    Transform,
    check_reads_batches,
    digest_of,
)
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.tensors import Allocator, allocate_tensor, as_indices, numpy_view, one_within, torch_dtype, within
from feedline.core.threads import DaemonPool
from feedline.datasets.arrays.npy import parse_structure
from feedline.datasets.arrays.records import is_all_numbers, is_record, part_of, samples_of
from feedline.datasets.decoding import DAMAGE, SampleTransform
from feedline.errors import ArgumentError, SampleError, StateError
from feedline.stores import CachedStore, ObjectRange, StoreError
from feedline.stores.base import Range
from feedline.stores.files import LazyList

ReadRows = Callable[[Sequence[Range]], Iterator[NDArray[Any]]]
"""Rows of each span, one array per span, in order; the implementation may fetch all spans at once."""


PrefetchRanges = Callable[[Sequence[Range]], list[tuple[CachedStore, ObjectRange]]]
"""Object ranges to prefetch into a cache for these spans of rows."""


ChunkCache = LoadingCache[tuple[str, int], NDArray[Any]]


_CHUNKS_AT_ONCE_NBYTES = 256 << 20
"""Memory for remote chunks that are decoded together, before their rows are copied."""


_CHUNKS_AT_ONCE = 256


class ByteLayout(Protocol):
    """Byte positions of an array's rows in its file."""

    def spans(self, start: int, stop: int) -> list[Range]:
        """Byte ranges needed to read the rows [start, stop).

        A range may hold more than these rows, where rows are stored in chunks.
        """
        ...


class Shape(NamedTuple):
    """Metadata of a stored array, known before its rows are read.

    `dtype` is that of the delivered rows, a structured one for records, and None for strings and rows of variable
    length. `chunk` is the number of rows that are read together, 1
    where any row costs the same. `byte_layout` is set for an array within one remote object.
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


class MappedRows:
    """Rows of a memory-mapped array."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        kernels.gather_rows(self._array, places, out=out)

    def ranges(self, _: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        return []


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

    With `prefetch_ranges`, chunks are remote, and as many as memory allows are read at once.
    """

    def __init__(
        self, path: str, shape: Shape, read: ReadRows, cache: ChunkCache, prefetch_ranges: PrefetchRanges | None = None
    ) -> None:
        self._path, self._shape, self._read, self._cache = path, shape, read, cache
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
            return next(read)
        except StoreError:
            raise
        except (*DAMAGE, RuntimeError) as error:  # codecs raise exceptions of any of these types
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

    Numeric arrays become tensors, NumPy scalars Python's own.
    """
    if isinstance(value, np.ndarray) and torch_dtype(value.dtype) is not None:
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


Names = str | Sequence[str] | Mapping[str, str] | None


RowSelection = slice | NDArray[np.int64]


_READERS = 8


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


CHUNK_CACHE_NBYTES = 1 << 26
"""Default size of the decoded chunks that each process keeps, in bytes."""


class StoredArrays(torch.utils.data.Dataset[Any]):
    """Dataset whose sample i is row i of each array.

    One array gives tensors, a sequence gives tuples, a mapping gives dicts. `columns=None` takes every array at the top
    level, by name. The rows of several sources are concatenated.
    """

    def __init__(
        self, sources: Sequence[ArraySource], columns: Names, transform: Transform | None, cache_nbytes: int
    ) -> None:
        self.paths = [source.name for source in sources]
        """Paths or addresses of the files or stores."""
        self._structure, listed = parse_structure(_common_names(sources) if columns is None else columns, (str,))
        self._step = SampleTransform(transform)
        self._shapes = [source.shapes(listed) for source in sources]
        for path, shapes in zip(self.paths, self._shapes, strict=True):
            _check_aligned(path, shapes)
            _check_equal_rows(self.paths[0], self._shapes[0], path, shapes)
        self._offsets = ShardOffsets(shapes[0].length for shapes in self._shapes)
        cache = PerProcess(partial(LoadingCache, cache_nbytes))
        self._opened = LazyList(partial(_open_rows, tuple(sources), self._shapes, cache), len(sources))
        several = len(sources) * len(listed) > 1
        # One thread pool per process: threads do not survive a fork.
        self._readers = PerProcess(_start_readers) if several and any(source.is_remote for source in sources) else None

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Rows of each chunk, for `ShardShuffled`; one shard per file without chunks."""
        return np.concatenate([_shard_sizes(shapes) for shapes in self._shapes])

    @property
    def listing_fingerprint(self) -> str:
        """Digest of file names and lengths, checked by saved loader states."""
        return digest_of(self.paths, self._offsets.sizes)

    def __len__(self) -> int:
        return len(self._offsets)

    def address(self, index: int) -> tuple[str, str]:
        """File or store of sample `index`, and its row: `"row 7"`."""
        at = one_within(index, len(self), type(self).__name__)
        file, row = self._offsets.one(at)
        return self.paths[file], f"row {row}"

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, in its own memory; negative indices count from the end."""
        at = one_within(index, len(self), type(self).__name__)
        return self._samples(np.array([at]), [None])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples of `indices`, read chunk by chunk.

        They share memory with each other only.
        """
        places = within(as_indices(indices), len(self), type(self).__name__)
        return self._samples(places, range(len(places)))

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into a cache for these samples."""
        places = within(indices, len(self), type(self).__name__)
        visits = self._visits(places)
        return [want for file, _, local in visits for rows in self._rows(file) for want in rows.ranges(local)]

    def _rows(self, file: int = 0) -> list[ArrayRows | ChunkedRows]:
        return self._opened[file]

    def _samples(self, places: NDArray[np.int64], rows: Sequence[int | None]) -> list[Any]:
        parts = self._read(places, allocate_tensor)
        samples = map(self._structure.sample, zip(*map(samples_of, parts), strict=True))
        return [self._step(sample, row) for sample, row in zip(samples, rows, strict=True)]

    def _read(self, places: NDArray[np.int64], allocate: Allocator) -> list[Any]:
        """Rows of each array, in the order of `places`.

        Numbers are one tensor in memory from `allocate`, records a dict of fields, other values a list.
        """
        outs = [_out(shape, len(places), allocate) for shape in self._shapes[0]]
        parts = [
            (rows, local, at, out)
            for file, at, local in self._visits(places)
            for rows, out in zip(self._rows(file), outs, strict=True)
        ]
        if self._readers is None or len(parts) < 2:
            for part in parts:
                _fill(part)
        else:
            list(self._readers().map(_fill, parts))
        return [part_of(out, allocate) if isinstance(out, np.ndarray) else out for out in outs]

    def _visits(self, places: NDArray[np.int64]) -> list[tuple[int, RowSelection, NDArray[np.int64]]]:
        """Group places by file.

        Returns (file number, rows of the batch, rows within the file) per file.
        """
        if len(self._shapes) == 1:
            return [(0, slice(None), places)]
        return [(file, _as_slice(at), rows) for file, at, rows in self._offsets.by_shard(places)]

    @property
    def traits(self) -> Traits:
        numbers = all(shape.dtype is not None and is_all_numbers(shape.dtype) for shape in self._shapes[0])
        return READS_BATCHES if numbers and self._step.transform is None else READS_SAMPLES

    def read_batch(self, request: BatchRead) -> Batch:
        """Collated batch; TypeError with a transform or arrays without a numeric dtype."""
        check_reads_batches(self)
        places = within(request.indices, len(self), type(self).__name__)
        return self._structure.batch(self._read(places, request.allocate))


def _common_names(sources: Sequence[ArraySource]) -> Names:
    """Names of all arrays; ArgumentError unless every source has the same."""
    names = sources[0].all_names()
    for source in sources[1:]:
        if (other := source.all_names()) != names:
            raise ArgumentError(
                f"{sources[0].name} has {_join(names)}, but {source.name} has {_join(other)}; name the arrays to read"
                " with columns="
            )
    return names


def _join(names: Names) -> str:
    return ", ".join(names or ()) or "nothing"


def _open_rows(
    sources: Sequence[ArraySource], shapes: Sequence[Sequence[Shape]], cache: PerProcess[ChunkCache], number: int
) -> list[ArrayRows | ChunkedRows]:
    whole = cache()
    return sources[number].rows(shapes[number], whole if len(sources) == 1 else _PartOfCache(whole, number))


class _PartOfCache(LoadingCache[tuple[str, int], NDArray[Any]]):
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


def _start_readers() -> DaemonPool:
    return DaemonPool(_READERS, "feedline-arrays")


def _shard_sizes(shapes: Sequence[Shape]) -> NDArray[np.int64]:
    length, chunk = shapes[0].length, max(shape.chunk for shape in shapes)
    if chunk == 1:
        return np.array([length])
    return np.diff(np.append(np.arange(0, length, chunk, dtype=np.int64), length))


def _as_slice(rows: NDArray[np.int64]) -> RowSelection:
    """Ascending rows, as a slice where they are consecutive.

    Writing to a slice needs no copy.
    """
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def _out(shape: Shape, count: int, allocate: Allocator) -> _Out:
    if shape.dtype is None:
        return [None] * count
    if is_record(shape.dtype):
        return np.empty((count, *shape.row_shape), shape.dtype)
    dtype = torch_dtype(shape.dtype)
    assert dtype is not None
    return allocate((count, *shape.row_shape), dtype)


_Out = torch.Tensor | NDArray[Any] | list[Any]
"""Memory for the rows of a batch: an array for records."""


def _fill(part: tuple[ArrayRows | ChunkedRows, NDArray[np.int64], RowSelection, _Out]) -> None:
    """Write rows into the rows `at` of a batch."""
    rows, places, at, out = part
    if isinstance(out, list):
        assert isinstance(rows, ChunkedRows)
        for row, value in zip(np.arange(len(out))[at].tolist(), rows.each(places), strict=True):
            out[row] = _as_plain(value)
        return
    view = out if isinstance(out, np.ndarray) else numpy_view(out)
    if isinstance(at, slice):
        rows.fill(places, view[at])
    else:
        some = np.empty((len(at), *view.shape[1:]), view.dtype)
        rows.fill(places, some)
        view[at] = some


def _as_plain(value: Any) -> Any:
    """Convert a row without a numeric dtype; nested rows become lists."""
    if not isinstance(value, np.ndarray):
        return value.item() if isinstance(value, np.generic) else value
    return [_as_plain(each) for each in value] if torch_dtype(value.dtype) is None else torch.from_numpy(value.copy())


def _check_equal_rows(first: str, wanted: Sequence[Shape], path: str, actual: Sequence[Shape]) -> None:
    for one, other in zip(wanted, actual, strict=True):
        if (one.row_shape, one.dtype) != (other.row_shape, other.dtype):
            raise ArgumentError(
                f"{one.name!r} has rows of {one.row_shape}, {one.dtype or 'strings'}, in {first}, but of"
                f" {other.row_shape}, {other.dtype or 'strings'}, in {path}; files that are read together must have"
                " equal row shapes and dtypes"
            )


def _check_aligned(path: str, shapes: Sequence[Shape]) -> None:
    if len({shape.length for shape in shapes}) > 1:
        each = ", ".join(f"{shape.name!r} has {shape.length}" for shape in shapes)
        raise ArgumentError(f"aligned arrays must have one length, but in {path} {each}")


def check_unchanged(path: str, was: Shape, length: int, row_shape: tuple[int, ...]) -> None:
    """StateError if length or row shape differ from those at construction."""
    if (length, row_shape) != (was.length, was.row_shape):
        raise StateError(
            f"{was.name!r} in {path} had {was.length} rows of {was.row_shape} when this dataset was created,"
            f" and has {length} of {row_shape} now; create the dataset again"
        )
