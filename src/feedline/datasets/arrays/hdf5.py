"""`HDF5`: rows of the datasets in HDF5 files."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from numpy.typing import NDArray

from feedline.core.paths import Pathlike
from feedline.core.stage_parts import DECODING, READ_FILES
from feedline.datasets.arrays import h5py_layout
from feedline.datasets.arrays.chunked import (
    ArrayRows,
    ArraySource,
    ByteLayout,
    ChunkCache,
    ChunkedRows,
    Names,
    ReadRows,
    Shape,
    WholeRows,
    check_unchanged,
)
from feedline.datasets.arrays.h5py_checks import LocalHeapFile, RemoteHeapFile
from feedline.datasets.arrays.rows import FileArrays
from feedline.datasets.arrays.stored_arrays import CHUNK_CACHE_NBYTES, StoredArrays
from feedline.datasets.content_digest import digest_of_files
from feedline.datasets.formats import FORMATS, ShardSummary
from feedline.datasets.paths import Paths, find
from feedline.datasets.shard_summaries import summarize_arrays
from feedline.stores import Cache, CachedStore, ObjectRange
from feedline.stores.base import Range
from feedline.stores.files import Extent, FileSet, LocalFile, local_info
from feedline.stores.urls import is_local


class HDF5(StoredArrays):
    """Rows along the first axis of the datasets in HDF5 files.

    `paths` is a path, a folder, a pattern, or a list of these; several files are concatenated. `columns` is one name, a
    sequence, or names by key; None takes every dataset at the top level. A contiguous, uncompressed dataset is read
    through a memory map. Chunks are decoded whole, and each process keeps the last `cache_nbytes` of them. Each process
    opens the files itself, on first use. Numbers become tensors, times int64 counts of their unit, compound values
    dicts of their fields, strings `str` or lists of them, and rows of variable length tensors of their own length.
    `transform(sample)` or `transform(sample, rng)` is applied to each sample.

    From a file in a store, the byte ranges of a batch are fetched concurrently and kept in the folder `cache` if one is
    given. `options` are passed to `open_store`.

    SampleError names a file that is damaged, and the rows of a damaged chunk.
    """

    def _find(
        self, paths: Paths, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None
    ) -> Sequence[ArraySource]:
        files = find(paths, FORMATS["hdf5"].pattern, cache=cache, options=options)
        self._sources = [_HDF5Source(files, number) for number in range(len(files))]
        return self._sources

    @property
    def content_fingerprint(self) -> str:
        """Digest of the files that hold rows, for cached results.

        Includes the files of links, of virtual datasets and of external data.
        """
        pairs = zip(self._sources, self._shapes, strict=True)
        return digest_of_files([path for source, shapes in pairs for path in source.local_paths(shapes)])


class _HDF5Source:
    """HDF5 file of a file set, local or remote."""

    def __init__(self, files: FileSet, number: int) -> None:
        self.name = files.name(number)
        self.is_remote = not is_local(self.name)
        self._files, self._number = files, number

    def all_names(self) -> Names:
        opened = self._open()  # bound to a name, because the file is closed with it
        with h5py_layout.naming_damage(self.name):
            self._check_mappings(list(opened.file))
            return h5py_layout.dataset_names(opened.file)

    def shapes(self, names: Sequence[str]) -> list[Shape]:
        opened = self._open()
        with h5py_layout.naming_damage(self.name):
            self._check_mappings(names)
            return [self._shape(h5py_layout.dataset_in(opened.file, name, self.name), name) for name in names]

    def rows(self, shapes: Sequence[Shape], cache: ChunkCache) -> list[ArrayRows | ChunkedRows]:
        opened = self._open()
        with h5py_layout.naming_damage(self.name):
            return [
                self._rows(opened, _reopen_dataset(opened.file, shape, self.name), shape, cache) for shape in shapes
            ]

    def local_paths(self, shapes: Sequence[Shape]) -> list[str]:
        """Files of this machine that hold rows.

        None for an object: the file set has its version.
        """
        if self.is_remote:
            return []
        opened = self._open()
        with h5py_layout.naming_damage(self.name):
            datasets = [h5py_layout.dataset_in(opened.file, shape.name, self.name) for shape in shapes]
            return sorted(set[str]().union(*(h5py_layout.check_sources(each, self.name) for each in datasets)))

    def _open(self) -> _OpenHDF5:
        # A file of this machine is opened by its path. Through a file object of Python, h5py takes twice as long for
        # chunks of 768 KiB and six times as long for 12 KiB. It also could not open the other files of links and
        # virtual datasets.
        file = self._files[self._number] if self.is_remote else None
        return _OpenHDF5(self.name, None if file is None else RemoteHeapFile(file))

    def _check_mappings(self, names: Sequence[str]) -> None:
        """Raise SampleError for a virtual dataset with a damaged list of sources.

        HDF5 reads the list from a heap when it opens the dataset.
        """
        if not self.is_remote:
            opened = self._open_local()
            for name in names:
                h5py_layout.open_own(opened.file, name)

    def _open_local(self) -> _OpenHDF5:
        return _OpenHDF5(self.name, LocalHeapFile(cast(LocalFile, self._files[self._number])))

    def _check(self, dataset: Any) -> None:
        """Raise unless all data of a dataset can be read."""
        if self.is_remote:
            h5py_layout.check_in_one_file(dataset, self.name)
            h5py_layout.check_filters(dataset, self.name)
        else:
            h5py_layout.check_sources(dataset, self.name)

    def _shape(self, dataset: Any, name: str) -> Shape:
        self._check(dataset)
        if h5py_layout.is_mappable(dataset):
            self._file_of(dataset)
        shape = h5py_layout.shape_of(dataset, name, self.name)  # first, because it refuses a single value
        return shape._replace(byte_layout=h5py_layout.byte_layout(dataset) if self.is_remote else None)

    def _rows(self, opened: _OpenHDF5, dataset: Any, shape: Shape, cache: ChunkCache) -> ArrayRows | ChunkedRows:
        self._check(dataset)
        if h5py_layout.is_mappable(dataset):
            return WholeRows(FileArrays(self._file_of(dataset), [h5py_layout.array_layout(dataset)]))
        if not self.is_remote and h5py_layout.has_heaps(dataset, self.name):
            # The conversion of strings takes longer than the calls of Python.
            opened = self._open_local()
            dataset = h5py_layout.dataset_in(opened.file, shape.name, self.name)
        places = _RowBytes(self._files, self._number, shape.byte_layout)
        chunks = _Chunks(opened, places, h5py_layout.row_reader(dataset))
        # HDF5 reads and decodes a chunk in one call.
        part = DECODING if self.is_remote or h5py_layout.is_filtered(dataset) else READ_FILES
        return ChunkedRows(self.name, shape, chunks.read, cache, chunks.ranges if self.is_remote else None, part)

    def _file_of(self, dataset: Any) -> FileSet:
        """The file with the rows of a contiguous dataset.

        SampleError if the file is truncated. In a folder, a link may point to another file.
        """
        store = self._files.store(self._number)
        info = self._files.info(self._number) if self.is_remote else local_info(dataset.file.filename)
        h5py_layout.check_length(dataset, info.path if store is None else self.name, info.size)
        return FileSet([(store, info)])


class _OpenHDF5:
    """HDF5 file that is open in h5py.

    h5py reads it from a `device`, or by its name without one. It closes with this object, at the latest before Python
    exits: h5py would crash the process if it closed a remote file later.
    """

    def __init__(self, name: str, device: RemoteHeapFile | LocalHeapFile | None) -> None:
        self._device = device
        self.file = h5py_layout.open_file(name if device is None else device, name)
        if device is not None:
            device.size_nbytes = h5py_layout.size_nbytes(self.file)
        weakref.finalize(self, self.file.close)

    def holding(self, spans: Sequence[Range]) -> AbstractContextManager[None]:
        """Fetch these bytes of a remote file, for reads within the block."""
        return self._device.holding(spans) if isinstance(self._device, RemoteHeapFile) else nullcontext()


class _RowBytes:
    """Byte ranges of one dataset's rows in one of the files."""

    def __init__(self, files: FileSet, number: int, byte_layout: ByteLayout | None) -> None:
        self.files, self._number, self._byte_layout = files, number, byte_layout

    def spans(self, rows: Sequence[Range]) -> list[Range]:
        """Byte ranges that hold these rows."""
        return [] if self._byte_layout is None else [place for span in rows for place in self._byte_layout.spans(*span)]

    def extents(self, rows: Sequence[Range]) -> list[Extent]:
        """Byte ranges that hold these rows, with the number of the file."""
        return [Extent(self._number, start, stop) for start, stop in self.spans(rows)]


class _Chunks:
    """Chunks of one dataset, fetched together, decoded by h5py one by one."""

    def __init__(self, opened: _OpenHDF5, places: _RowBytes, decode: ReadRows) -> None:
        self._opened, self._row_bytes, self._decode = opened, places, decode

    def read(self, spans: Sequence[Range]) -> Iterator[NDArray[Any]]:
        with self._opened.holding(self._row_bytes.spans(spans)):
            yield from self._decode(spans)

    def ranges(self, spans: Sequence[Range]) -> list[tuple[CachedStore, ObjectRange]]:
        return self._row_bytes.files.ranges(self._row_bytes.extents(spans))


def _reopen_dataset(file: Any, shape: Shape, path: str) -> Any:
    """Open a dataset again; StateError if its shape has changed."""
    dataset = h5py_layout.dataset_in(file, shape.name, path)
    check_unchanged(path, shape, dataset.shape[0], h5py_layout.row_shape(dataset))
    return dataset


def summarize_chunks(paths: Sequence[str]) -> ShardSummary:
    """Chunks of HDF5 files."""
    return summarize_arrays(HDF5, find(paths, FORMATS["hdf5"].pattern).names, CHUNK_CACHE_NBYTES)
