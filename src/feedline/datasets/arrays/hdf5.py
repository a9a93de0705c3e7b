"""`HDF5`: rows of the datasets in HDF5 files."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.arrays import h5py_layout
from feedline.datasets.arrays.chunked import (
    CHUNK_CACHE_NBYTES,
    ArrayRows,
    ChunkCache,
    ChunkedRows,
    Lies,
    MappedRows,
    Names,
    ReadRows,
    Shape,
    StoredArrays,
    refuse_changed,
)
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.file_objects import FarFile
from feedline.datasets.formats import FORMATS, ShardSummary
from feedline.datasets.paths import Paths, find
from feedline.datasets.shard_summaries import summarize_arrays
from feedline.stores import Cache, CachedStore, ObjectRange
from feedline.stores.base import Range
from feedline.stores.files import Extent, FileSet, LocalFile, RemoteBlob
from feedline.stores.urls import is_local


class HDF5(StoredArrays):
    """Rows along the first axis of datasets in an HDF5 file; of several files, one after the other.

    `paths` is a path, a folder, a pattern, or a list of these. `columns` is one name, a sequence, or names by key; None
    is every dataset at the top. A dataset that lies in one piece, uncompressed, is read through a memory map; chunks
    are decoded whole, and the last `cache_nbytes` of them kept. Each process opens the files for itself, on first use.
    Numbers become tensors, strings texts or lists of them, and rows of variable length tensors of their own length.

    Of a file in a store, what a batch needs is read in ranges, all at once, and kept in the folder `cache`, if one is
    given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Names = None,
        *,
        transform: Transform | None = None,
        cache_nbytes: int = CHUNK_CACHE_NBYTES,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        blobs = find(paths, FORMATS["hdf5"].pattern, cache=cache, options=options)
        super().__init__([_held(blobs, number) for number in range(len(blobs))], columns, transform, cache_nbytes)


def _held(blobs: FileSet, number: int) -> _LocalFile | _FileInStore:
    name = blobs.name(number)
    return _LocalFile(name) if is_local(name) else _FileInStore(blobs, number)


class _LocalFile:
    """A file of this machine."""

    is_remote = False

    def __init__(self, path: str) -> None:
        self.name = path

    def everything(self) -> Names:
        with closing(self._opened()) as file:
            return h5py_layout.everything(file)

    def shapes(self, names: Sequence[str]) -> list[Shape]:
        with closing(self._opened()) as file:
            return [self._shape(h5py_layout.dataset_in(file, name, self.name), name) for name in names]

    def rows(self, shapes: Sequence[Shape], cache: ChunkCache) -> list[ArrayRows | ChunkedRows]:
        file = self._opened()
        return [self._rows(_unchanged(file, shape, self.name), shape, cache) for shape in shapes]

    def _opened(self) -> Any:
        return h5py_layout.opened(self.name, self.name)

    def _shape(self, dataset: Any, name: str) -> Shape:
        h5py_layout.refuse_gone(dataset, self.name)
        return h5py_layout.shape_of(dataset, name, self.name)

    def _rows(self, dataset: Any, shape: Shape, cache: ChunkCache) -> ArrayRows | ChunkedRows:
        h5py_layout.refuse_gone(dataset, self.name)
        if h5py_layout.is_plain(dataset):
            return MappedRows(h5py_layout.mapped(dataset))
        return ChunkedRows(self.name, shape, h5py_layout.reader(dataset), cache)


class _FileInStore:
    """A file in a store: h5py reads what it must know of it by blocks; data are read at once, many ranges at a time."""

    is_remote = True

    def __init__(self, blobs: FileSet, number: int) -> None:
        self.name = blobs.name(number)
        self._blobs, self._number = blobs, number

    def everything(self) -> Names:
        far = self._opened()
        return h5py_layout.everything(far.file)

    def shapes(self, names: Sequence[str]) -> list[Shape]:
        far = self._opened()
        return [self._shape(far.dataset(name), name) for name in names]

    def rows(self, shapes: Sequence[Shape], cache: ChunkCache) -> list[ArrayRows | ChunkedRows]:
        far = self._opened()
        return [self._rows(far, _unchanged(far.file, shape, self.name), shape, cache) for shape in shapes]

    def _opened(self) -> _FarHDF5:
        return _FarHDF5(self._blobs[self._number], self.name)

    def _shape(self, dataset: Any, name: str) -> Shape:
        h5py_layout.refuse_elsewhere(dataset, self.name)
        if h5py_layout.is_plain(dataset):
            h5py_layout.refuse_truncated(dataset, self.name, self._blobs.info(self._number).size)
        return h5py_layout.shape_of(dataset, name, self.name)._replace(lies=h5py_layout.lies(dataset))

    def _rows(self, far: _FarHDF5, dataset: Any, shape: Shape, cache: ChunkCache) -> ArrayRows | ChunkedRows:
        if h5py_layout.is_plain(dataset):
            return _FarRows(_Places(self._blobs, self._number, shape.lies), shape, dataset.dtype)
        reading = _FarReading(far, _Places(self._blobs, self._number, shape.lies), h5py_layout.reader(dataset))
        return ChunkedRows(self.name, shape, reading.read, cache, reading.ranges)


class _FarHDF5:
    """An open file in a store. It is closed with this, or before Python ends: later, h5py would kill the process."""

    def __init__(self, blob: LocalFile | RemoteBlob, name: str) -> None:
        self.device = FarFile(blob)
        self._name = name
        self.file = h5py_layout.opened(self.device, name)
        weakref.finalize(self, self.file.close)

    def dataset(self, name: str) -> Any:
        return h5py_layout.dataset_in(self.file, name, self._name)


class _Places:
    """Where the rows of one dataset lie in one of the files."""

    def __init__(self, blobs: FileSet, number: int, lies: Lies | None) -> None:
        self.blobs, self._number, self._lies = blobs, number, lies

    def spans(self, rows: Sequence[Range]) -> list[Range]:
        """The bytes of the file that hold these rows."""
        return [] if self._lies is None else [place for span in rows for place in self._lies.spans(*span)]

    def extents(self, rows: Sequence[Range]) -> list[Extent]:
        """The same, and in which file."""
        return [Extent(self._number, start, stop) for start, stop in self.spans(rows)]


class _FarReading:
    """Chunks of one dataset: their bytes are fetched together, and decoded by the library one after the other."""

    def __init__(self, far: _FarHDF5, places: _Places, decode: ReadRows) -> None:
        self._far, self._places, self._decode = far, places, decode

    def read(self, spans: Sequence[Range]) -> Iterator[NDArray[Any]]:
        with self._far.device.holding(self._places.spans(spans)):
            yield from self._decode(spans)

    def ranges(self, spans: Sequence[Range]) -> list[tuple[CachedStore, ObjectRange]]:
        return self._places.blobs.ranges(self._places.extents(spans))


class _FarRows:
    """Rows that lie in the file as they would in memory: ranges of it, which need no library."""

    def __init__(self, places: _Places, shape: Shape, dtype: np.dtype[Any]) -> None:
        self._places, self._shape, self._dtype = places, shape, dtype

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        for row, view in enumerate(self._places.blobs.read(self._extents(places))):
            out[row] = np.ndarray(self._shape.row_shape, self._dtype, view)

    def ranges(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        return self._places.blobs.ranges(self._extents(places))

    def _extents(self, places: NDArray[np.int64]) -> list[Extent]:
        return self._places.extents([(at, at + 1) for at in places.tolist()])


def _unchanged(file: Any, shape: Shape, path: str) -> Any:
    """The dataset, which must be the one that the shape was told of."""
    dataset = h5py_layout.dataset_in(file, shape.name, path)
    refuse_changed(path, shape, dataset.shape[0], dataset.shape[1:])
    return dataset


def summarize_chunks(paths: Sequence[str]) -> ShardSummary:
    """The chunks of HDF5 files."""
    return summarize_arrays(HDF5, find(paths, FORMATS["hdf5"].pattern).names, CHUNK_CACHE_NBYTES)
