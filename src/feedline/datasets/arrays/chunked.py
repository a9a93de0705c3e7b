"""Aligned arrays in one file or store with a library of its own: what `HDF5` and `Zarr` share.

Rows of arrays that are stored in chunks: read chunk by chunk, the last chunks kept decoded.
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
from feedline.core.dataset import READS_BATCHES, READS_SAMPLES, Batch, BatchRead, Traits, check_reads_batches
from feedline.core.tensors import Allocator, allocate_tensor, as_indices, numpy_view, one_within, torch_dtype, within
from feedline.core.threads import DaemonPool
from feedline.datasets.arrays.npy import Transform, _structured
from feedline.datasets.decoding import DAMAGE, SampleTransform
from feedline.errors import ArgumentError, SampleError, StateError
from feedline.stores import CachedStore, ObjectRange, StoreError
from feedline.stores.base import Range
from feedline.stores.files import LazyList

ReadRows = Callable[[Sequence[Range]], Iterator[NDArray[Any]]]
"""The rows of each span, from its start up to its stop, one after the other; what they need may come all at once."""


Wanting = Callable[[Sequence[Range]], list[tuple[CachedStore, ObjectRange]]]
"""What a prefetch has to bring into a cache for these spans of rows."""


ChunkCache = LoadingCache[tuple[str, int], NDArray[Any]]


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


class ArrayRows(Protocol):
    """The rows of one array of numbers, in one process."""

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Write the rows at these places into those of `out`."""
        ...

    def ranges(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """What a prefetch has to bring into a cache for these rows."""
        ...


class MappedRows:
    """Rows of an array in mapped memory."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        kernels.gather_rows(self._array, places, out=out)

    def ranges(self, _: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        return []


class _RowBlock(NamedTuple):
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

    def ranges(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
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

    def _part(self, needed: NDArray[np.int64]) -> _RowBlock:
        number = int(needed[0]) // self._shape.chunk
        start = number * self._shape.chunk
        stop = min(start + self._shape.chunk, self._shape.length)
        if (stop - start) * self._row_nbytes() > self._cache.limit_nbytes:
            return _RowBlock(number, int(needed.min()), int(needed.max()) + 1, kept=False)
        return _RowBlock(number, start, stop, kept=True)

    def _is_kept(self, part: _RowBlock) -> bool:
        return part.kept and (self._shape.name, part.number) in self._cache

    def _arrays(self, parts: Sequence[_RowBlock]) -> Iterator[NDArray[Any]]:
        missing = [part for part in parts if not self._is_kept(part)]
        # A single one is left to the cache, which reads it once for all threads.
        together = set(missing) if len(missing) > 1 else set()
        read = self._rows(missing)
        for part in parts:
            one = iter([next(read)]) if part in together else self._rows([part])
            yield self._cache.get((self._shape.name, part.number), partial(next, one)) if part.kept else next(one)

    def _rows(self, parts: Sequence[_RowBlock]) -> Iterator[NDArray[Any]]:
        read = self._read([(part.start, part.stop) for part in parts])
        for part in parts:
            array = self._checked(part, read)
            yield array if self._shape.dtype is None else array.astype(self._shape.dtype, copy=False)

    def _checked(self, part: _RowBlock, read: Iterator[NDArray[Any]]) -> NDArray[Any]:
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


Names = str | Sequence[str] | Mapping[str, str] | None


Some = slice | NDArray[np.int64]


_READERS = 8


class Holder(Protocol):
    """The file or store that holds the arrays: opened when asked, pickled as what finds it again."""

    @property
    def name(self) -> str:
        """Its path or address."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether it is far away, so that arrays had better be read at the same time."""
        ...

    def everything(self) -> Names:
        """The names of all arrays at the top, by name."""
        ...

    def shapes(self, names: Sequence[str]) -> list[Shape]:
        """The shapes of these arrays; ArgumentError names one that is not there."""
        ...

    def rows(self, shapes: Sequence[Shape], cache: ChunkCache) -> list[ArrayRows | ChunkedRows]:
        """What reads their rows in this process; StateError if they are not what they were."""
        ...


CHUNK_CACHE_NBYTES = 1 << 26
"""The decoded chunks that each process keeps by default."""


class StoredArrays(torch.utils.data.Dataset[Any]):
    """Row i of each array is sample i; one array gives tensors, a sequence gives tuples, a mapping gives dicts.

    `columns=None` takes every array at the top, by its name. The rows of several holders come one after the other.
    """

    def __init__(
        self, holders: Sequence[Holder], columns: Names, transform: Transform | None, cache_nbytes: int
    ) -> None:
        self.paths = [holder.name for holder in holders]
        """The files or stores."""
        self._structure, listed = _structured(_everything(holders) if columns is None else columns, (str,))
        self._step = SampleTransform(transform)
        self._shapes = [holder.shapes(listed) for holder in holders]
        for path, shapes in zip(self.paths, self._shapes, strict=True):
            _refuse_unaligned(path, shapes)
            _refuse_unlike(self.paths[0], self._shapes[0], path, shapes)
        self._stops = np.cumsum([shapes[0].length for shapes in self._shapes])
        cache = PerProcess(partial(LoadingCache, cache_nbytes))
        self._opened = LazyList(partial(_opened, tuple(holders), self._shapes, cache), len(holders))
        several = len(holders) * len(listed) > 1
        self._readers = PerProcess(_readers) if several and any(holder.is_remote for holder in holders) else None

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """The rows of each chunk, for `ShardShuffled`; all of a file are one shard where any row costs the same."""
        return np.concatenate([_shard_sizes(shapes) for shapes in self._shapes])

    def __len__(self) -> int:
        return int(self._stops[-1])

    def address(self, index: int) -> tuple[str, str]:
        """The file or store of sample `index`, and its row in it: `"row 7"`."""
        at = one_within(index, len(self), type(self).__name__)
        [(file, _, [row])] = self._visits(np.array([at]))
        return self.paths[file], f"row {row}"

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, in memory of its own; negative indices count from the end."""
        at = one_within(index, len(self), type(self).__name__)
        return self._samples(np.array([at]), [None])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, chunk by chunk; they share memory with each other only."""
        places = within(as_indices(indices), len(self), type(self).__name__)
        return self._samples(places, range(len(places)))

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """What reading these samples will want from a cache."""
        places = within(indices, len(self), type(self).__name__)
        visits = self._visits(places)
        return [want for file, _, local in visits for rows in self._rows(file) for want in rows.ranges(local)]

    def _rows(self, file: int = 0) -> list[ArrayRows | ChunkedRows]:
        return self._opened[file]

    def _samples(self, places: NDArray[np.int64], rows: Sequence[int | None]) -> list[Any]:
        parts = self._read(places, allocate_tensor)
        columns = (part.unbind() if isinstance(part, torch.Tensor) else part for part in parts)
        samples = map(self._structure.sample, zip(*columns, strict=True))
        return [self._step(sample, row) for sample, row in zip(samples, rows, strict=True)]

    def _read(self, places: NDArray[np.int64], empty: Allocator) -> list[Any]:
        """The rows of each array: numbers as one tensor in memory from `empty`, others as a list."""
        outs = [_out(shape, len(places), empty) for shape in self._shapes[0]]
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
        return outs

    def _visits(self, places: NDArray[np.int64]) -> list[tuple[int, Some, NDArray[np.int64]]]:
        """For each file that is needed: its number, which samples of the batch it has, and their rows in it."""
        if len(self._stops) == 1:
            return [(0, slice(None), places)]
        files = self._stops.searchsorted(places, side="right")
        order = np.argsort(files, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(files[order])) + 1) if len(order) else []
        firsts = self._stops - [shapes[0].length for shapes in self._shapes]
        return [(file := int(files[group[0]]), _as_slice(group), places[group] - firsts[file]) for group in groups]

    @property
    def traits(self) -> Traits:
        one_by_one = self._step.transform is not None or any(shape.dtype is None for shape in self._shapes[0])
        return READS_SAMPLES if one_by_one else READS_BATCHES

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch; TypeError with a transform, and for arrays that do not hold numbers."""
        check_reads_batches(self)
        places = within(request.indices, len(self), type(self).__name__)
        return self._structure.batch(self._read(places, request.allocate))


def _everything(holders: Sequence[Holder]) -> Names:
    """The names of all arrays, which every holder must have."""
    names = holders[0].everything()
    for holder in holders[1:]:
        if (found := holder.everything()) != names:
            raise ArgumentError(
                f"{holders[0].name} has {_told(names)}, but {holder.name} has {_told(found)}; name what shall be read"
            )
    return names


def _told(names: Names) -> str:
    return ", ".join(names or ()) or "nothing"


def _opened(
    holders: Sequence[Holder], shapes: Sequence[Sequence[Shape]], cache: PerProcess[ChunkCache], number: int
) -> list[ArrayRows | ChunkedRows]:
    whole = cache()
    return holders[number].rows(shapes[number], whole if len(holders) == 1 else _PartOfCache(whole, number))


class _PartOfCache(LoadingCache[tuple[str, int], NDArray[Any]]):
    """What one of several holders keeps in the cache of all."""

    def __init__(self, whole: ChunkCache, number: int) -> None:
        super().__init__(whole.limit_nbytes)
        self._whole, self._number = whole, number

    def __contains__(self, key: object) -> bool:
        return self._key(key) in self._whole

    def get(self, key: tuple[str, int], make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """As that of the whole."""
        return self._whole.get(self._key(key), make)

    def _key(self, key: Any) -> tuple[str, int]:
        name, chunk = key
        return f"{self._number} {name}", chunk


def _readers() -> DaemonPool:
    return DaemonPool(_READERS, "feedline-arrays")


def _shard_sizes(shapes: Sequence[Shape]) -> NDArray[np.int64]:
    length, chunk = shapes[0].length, max(shape.chunk for shape in shapes)
    if chunk == 1:
        return np.array([length])
    return np.diff(np.append(np.arange(0, length, chunk, dtype=np.int64), length))


def _as_slice(rows: NDArray[np.int64]) -> Some:
    """Rows in ascending order, as a slice where they follow each other: it is written to without a copy."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def _out(shape: Shape, count: int, empty: Allocator) -> torch.Tensor | list[Any]:
    if shape.dtype is None:
        return [None] * count
    dtype = torch_dtype(shape.dtype)
    assert dtype is not None
    return empty((count, *shape.row_shape), dtype)


def _fill(part: tuple[ArrayRows | ChunkedRows, NDArray[np.int64], Some, torch.Tensor | list[Any]]) -> None:
    """Write rows into those of a batch that `at` names."""
    rows, places, at, out = part
    if isinstance(out, list):
        assert isinstance(rows, ChunkedRows)
        for row, value in zip(np.arange(len(out))[at].tolist(), rows.each(places), strict=True):
            out[row] = _plain(value)
    elif isinstance(at, slice):
        rows.fill(places, numpy_view(out)[at])
    else:
        view = numpy_view(out)
        some = np.empty((len(at), *view.shape[1:]), view.dtype)
        rows.fill(places, some)
        view[at] = some


def _plain(value: Any) -> Any:
    """A row that is an array of texts, or of rows of any length, as lists of them."""
    if not isinstance(value, np.ndarray):
        return value.item() if isinstance(value, np.generic) else value
    return [_plain(each) for each in value] if torch_dtype(value.dtype) is None else torch.from_numpy(value.copy())


def _refuse_unlike(first: str, wanted: Sequence[Shape], path: str, found: Sequence[Shape]) -> None:
    for one, other in zip(wanted, found, strict=True):
        if (one.row_shape, one.dtype) != (other.row_shape, other.dtype):
            raise ArgumentError(
                f"{one.name!r} has rows of {one.row_shape}, {one.dtype or 'texts'}, in {first}, but of"
                f" {other.row_shape}, {other.dtype or 'texts'}, in {path}; files that are read together have rows alike"
            )


def _refuse_unaligned(path: str, shapes: Sequence[Shape]) -> None:
    if len({shape.length for shape in shapes}) > 1:
        each = ", ".join(f"{shape.name!r} has {shape.length}" for shape in shapes)
        raise ArgumentError(f"aligned arrays have one length, but in {path} {each}")


def refuse_changed(path: str, was: Shape, length: int, row_shape: tuple[int, ...]) -> None:
    """StateError if the array is not the one that the dataset was made from."""
    if (length, row_shape) != (was.length, was.row_shape):
        raise StateError(
            f"{was.name!r} in {path} had {was.length} rows of {was.row_shape} when this dataset was made,"
            f" and has {length} of {row_shape} now; make the dataset anew"
        )
