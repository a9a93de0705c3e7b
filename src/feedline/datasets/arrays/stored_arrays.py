"""`StoredArrays`: the base of `HDF5` and `Zarr`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.caches import LoadingCache, PerProcess
from feedline.core.dataset import TransformFunction
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.stage_parts import read_part
from feedline.core.tensors import (
    Allocator,
    allocate_tensor,
    normalize_index,
    normalize_indices,
    numpy_view,
    torch_dtype,
)
from feedline.core.threads import DaemonPool
from feedline.datasets.arrays.aligned import AlignedArrays, parse_structure
from feedline.datasets.arrays.chunked import ArrayRows, ArraySource, ChunkCache, ChunkedRows, Names, PartOfCache, Shape
from feedline.datasets.arrays.records import BatchedRows, is_record, part_of, samples_of
from feedline.datasets.paths import Paths
from feedline.errors import ArgumentError
from feedline.stores import Cache, CachedStore, ObjectRange
from feedline.stores.files import LazyList

RowSelection = slice | NDArray[np.int64]


_READERS = 8
"""Number of threads. Each reads whole arrays or files, with more threads of its own."""


CHUNK_CACHE_NBYTES = 1 << 26
"""Default size of the decoded chunks that each process keeps, in bytes."""


class StoredArrays(AlignedArrays):
    """Dataset whose sample i is row i of each array.

    One array gives tensors, a sequence gives tuples, a mapping gives dicts. `columns=None` takes every array at the top
    level, by name. The rows of several sources are concatenated. A subclass opens the sources.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Names = None,
        *,
        transform: TransformFunction | None = None,
        cache_nbytes: int = CHUNK_CACHE_NBYTES,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        sources = self._find(paths, cache, options)
        self.paths = [source.name for source in sources]
        """Paths or addresses of the files or stores."""
        structure, listed = parse_structure(_common_names(sources) if columns is None else columns, (str,))
        self._shapes = [source.shapes(listed) for source in sources]
        for path, shapes in zip(self.paths, self._shapes, strict=True):
            _check_aligned(path, shapes)
            _check_equal_rows(self.paths[0], self._shapes[0], path, shapes)
        self._offsets = ShardOffsets(shapes[0].length for shapes in self._shapes)
        super().__init__(structure, [shape.dtype for shape in self._shapes[0]], len(self._offsets), transform)
        chunks: PerProcess[ChunkCache] = PerProcess(partial(LoadingCache, cache_nbytes))
        self._opened = LazyList(partial(_open_rows, tuple(sources), self._shapes, chunks), len(sources))
        several = len(sources) * len(listed) > 1
        # One thread pool per process: threads do not survive a fork.
        self._readers = PerProcess(_start_readers) if several and any(source.is_remote for source in sources) else None

    def _find(
        self, paths: Paths, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None
    ) -> Sequence[ArraySource]:
        """The files or stores at these paths, in order."""
        raise NotImplementedError

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Rows of each chunk, int64, for `samplers.ShardShuffled`.

        Files without chunks are one shard each.
        """
        return np.concatenate([_shard_sizes(shapes) for shapes in self._shapes])

    @property
    def listing_fingerprint(self) -> str:
        """Digest of file names and lengths, checked by saved loader states."""
        return digest_of(self.paths, self._offsets.sizes)

    def address(self, index: int) -> tuple[str, str]:
        """File or store of sample `index`, and its row: `"row 7"`."""
        at = normalize_index(index, len(self), type(self).__name__)
        file, row = self._offsets.one(at)
        return self.paths[file], f"row {row}"

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into a cache for these samples."""
        places = normalize_indices(indices, len(self), type(self).__name__)
        visits = self._visits(places)
        return [want for file, _, local in visits for rows in self._rows(file) for want in rows.ranges(local)]

    def _rows(self, file: int = 0) -> list[ArrayRows | ChunkedRows]:
        return self._opened[file]

    def _one(self, at: int) -> Sequence[Any]:
        return [next(iter(samples_of(part))) for part in self._read(np.array([at]), allocate_tensor)]

    def _take(self, indices: NDArray[np.int64], allocate: Allocator) -> list[BatchedRows]:
        return self._read(normalize_indices(indices, len(self), type(self).__name__), allocate)

    def _read(self, places: NDArray[np.int64], allocate: Allocator) -> list[BatchedRows]:
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
            with read_part(self.paths[0]):  # threads, which are not timed, also decode
                list(self._readers().map(_fill, parts))
        return [part_of(out, allocate) if isinstance(out, np.ndarray) else out for out in outs]

    def _visits(self, places: NDArray[np.int64]) -> list[tuple[int, RowSelection, NDArray[np.int64]]]:
        """Group places by file.

        Returns (file number, rows of the batch, rows within the file) per file.
        """
        if len(self._shapes) == 1:
            return [(0, slice(None), places)]
        return [(file, _as_slice(at), rows) for file, at, rows in self._offsets.by_shard(places)]


def _common_names(sources: Sequence[ArraySource]) -> Names:
    """Names of all arrays; ArgumentError unless all sources have the same."""
    names = sources[0].all_names()
    if not names and names not in ("", None):  # "" is a store that is an array itself
        raise ArgumentError(
            f"{sources[0].name} has no array at its top level; name arrays of its groups with columns=, such as"
            " 'group/array'"
        )
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
    return sources[number].rows(shapes[number], whole if len(sources) == 1 else PartOfCache(whole, number))


def _start_readers() -> DaemonPool:
    return DaemonPool(_READERS, "feedline-arrays")


def _shard_sizes(shapes: Sequence[Shape]) -> NDArray[np.int64]:
    length, chunk = shapes[0].length, max(shape.chunk for shape in shapes)
    if chunk == 1:
        return np.array([length])
    return np.diff(np.append(np.arange(0, length, chunk, dtype=np.int64), length))


def _as_slice(rows: NDArray[np.int64]) -> RowSelection:
    """Ascending rows, as a slice if they are consecutive.

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
    """Write a part into the rows `at` of a batch."""
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
        raise ArgumentError(
            f"aligned arrays must have one length, but in {path} {each}; name those to read with columns="
        )
