"""`HDF5`: rows of the datasets in an HDF5 file."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.datasets import hdf5_files
from feedline.datasets.arrays import Transform
from feedline.datasets.chunked_rows import ChunkCache, ChunkedRows, MappedRows, ReadRows, Rows, Shape
from feedline.datasets.far_file import FarFile
from feedline.datasets.files import Pathlike
from feedline.datasets.paths import find
from feedline.datasets.stored_arrays import Names, StoredArrays, refuse_changed
from feedline.errors import ArgumentError
from feedline.stores import Cache, CachedStore, Want
from feedline.stores.addresses import scheme_of
from feedline.stores.blobs import Blobs, Extent
from feedline.stores.protocol import Range


class HDF5(StoredArrays):
    """Rows along the first axis of datasets in an HDF5 file.

    `names` is one name, a sequence, or names by key; None is every dataset at the top. A dataset that lies in one
    piece, uncompressed, is read through a memory map; chunks are decoded whole, and the last `cache_nbytes` of them
    kept. Each process opens the file for itself, on first use. Numbers become tensors, strings texts, and rows of
    variable length tensors of their own length.

    Of a file in a store, what a batch needs is read in ranges, all at once, and kept in the folder `cache`, if one is
    given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        path: Pathlike,
        names: Names = None,
        *,
        transform: Transform | None = None,
        cache_nbytes: int = 1 << 26,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        address = os.fspath(path)
        holder: _LocalFile | _FileInStore = (
            _LocalFile(str(Path(address.removeprefix("file://")).resolve()))
            if scheme_of(address) == "file"
            else _FileInStore(find(address, "*.h5", cache=cache, options=options))
        )
        super().__init__(holder, names, transform, cache_nbytes)


class _LocalFile:
    """A file of this machine."""

    is_remote = False

    def __init__(self, path: str) -> None:
        self.name = path

    def everything(self) -> Names:
        with closing(self._opened()) as file:
            return hdf5_files.everything(file)

    def shapes(self, names: Sequence[str]) -> list[Shape]:
        with closing(self._opened()) as file:
            return [
                hdf5_files.shape_of(hdf5_files.dataset_in(file, name, self.name), name, self.name) for name in names
            ]

    def rows(self, shapes: Sequence[Shape], cache: ChunkCache) -> list[Rows | ChunkedRows]:
        file = self._opened()
        return [self._rows(_unchanged(file, shape, self.name), shape, cache) for shape in shapes]

    def _opened(self) -> Any:
        return hdf5_files.opened(self.name, self.name)

    def _rows(self, dataset: Any, shape: Shape, cache: ChunkCache) -> Rows | ChunkedRows:
        if hdf5_files.is_plain(dataset):
            return MappedRows(hdf5_files.mapped(dataset, self.name))
        return ChunkedRows(self.name, shape, hdf5_files.reader(dataset), cache)


class _FileInStore:
    """A file in a store: h5py reads what it must know of it by blocks; data are read at once, many ranges at a time."""

    is_remote = True

    def __init__(self, blobs: Blobs) -> None:
        if len(blobs) != 1:
            raise ArgumentError(f"HDF5 reads one file; {blobs.name(0)} and {len(blobs) - 1} more were found")
        self.name = blobs.name(0)
        self._blobs = blobs

    def everything(self) -> Names:
        far = _FarHDF5(self._blobs)
        return hdf5_files.everything(far.file)

    def shapes(self, names: Sequence[str]) -> list[Shape]:
        far = _FarHDF5(self._blobs)
        return [self._shape(far.dataset(name), name) for name in names]

    def rows(self, shapes: Sequence[Shape], cache: ChunkCache) -> list[Rows | ChunkedRows]:
        far = _FarHDF5(self._blobs)
        return [self._rows(far, _unchanged(far.file, shape, self.name), shape, cache) for shape in shapes]

    def _shape(self, dataset: Any, name: str) -> Shape:
        hdf5_files.refuse_elsewhere(dataset, self.name)
        if hdf5_files.is_plain(dataset):
            hdf5_files.refuse_truncated(dataset, self.name, self._blobs.info(0).size)
        return hdf5_files.shape_of(dataset, name, self.name)._replace(lies=hdf5_files.lies(dataset))

    def _rows(self, far: _FarHDF5, dataset: Any, shape: Shape, cache: ChunkCache) -> Rows | ChunkedRows:
        if hdf5_files.is_plain(dataset):
            return _FarRows(self._blobs, shape, dataset.dtype)
        reading = _FarReading(far, self._blobs, shape, hdf5_files.reader(dataset))
        return ChunkedRows(self.name, shape, reading.read, cache, reading.wants)


class _FarHDF5:
    """An open file in a store. It is closed with this, or before Python ends: later, h5py would kill the process."""

    def __init__(self, blobs: Blobs) -> None:
        self.device = FarFile(blobs[0])
        self._name = blobs.name(0)
        self.file = hdf5_files.opened(self.device, self._name)
        weakref.finalize(self, self.file.close)

    def dataset(self, name: str) -> Any:
        return hdf5_files.dataset_in(self.file, name, self._name)


class _FarReading:
    """Chunks of one dataset: their bytes are fetched together, and decoded by the library one after the other."""

    def __init__(self, far: _FarHDF5, blobs: Blobs, shape: Shape, decode: ReadRows) -> None:
        self._far, self._blobs, self._lies, self._decode = far, blobs, shape.lies, decode

    def read(self, spans: Sequence[Range]) -> Iterator[NDArray[Any]]:
        with self._far.device.holding(self._places(spans)):
            yield from self._decode(spans)

    def wants(self, spans: Sequence[Range]) -> list[tuple[CachedStore, Want]]:
        return self._blobs.wants([Extent(0, start, stop) for start, stop in self._places(spans)])

    def _places(self, spans: Sequence[Range]) -> list[Range]:
        return [] if self._lies is None else [place for span in spans for place in self._lies.spans(*span)]


class _FarRows:
    """Rows that lie in the file as they would in memory: ranges of it, which need no library."""

    def __init__(self, blobs: Blobs, shape: Shape, dtype: np.dtype[Any]) -> None:
        self._blobs, self._shape, self._dtype = blobs, shape, dtype

    def fill(self, places: NDArray[np.int64], out: NDArray[Any]) -> None:
        for row, view in enumerate(self._blobs.read(self._extents(places))):
            out[row] = np.ndarray(self._shape.row_shape, self._dtype, view)

    def wants(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        return self._blobs.wants(self._extents(places))

    def _extents(self, places: NDArray[np.int64]) -> list[Extent]:
        lies = self._shape.lies
        assert lies is not None
        return [Extent(0, *span) for at in places.tolist() for span in lies.spans(at, at + 1)]


def _unchanged(file: Any, shape: Shape, path: str) -> Any:
    """The dataset, which must be the one that the shape was told of."""
    dataset = hdf5_files.dataset_in(file, shape.name, path)
    refuse_changed(path, shape, dataset.shape[0], dataset.shape[1:])
    return dataset
