"""Checks of HDF5 files before HDF5 or a plugin reads them.

HDF5 keeps strings and rows of variable length in global heaps: pages of objects that follow each other. It never
finishes a damaged page in which an object without a number has the size 0, such as a page of zeros. Plugins that
decompress chunks do not check the lengths in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import prod
from typing import Any

from feedline.datasets.arrays.frames import check_bitshuffle, check_blosc
from feedline.datasets.file_objects import BlockFile, RangeFile
from feedline.errors import SampleError
from feedline.stores.files import File, LocalFile

_HEAP_MAGIC = b"GCOL"


_BLOSC, _BITSHUFFLE = 32001, 32008


_COMPRESSIONS = 2, 3
"""LZ4 and Zstandard of bitshuffle. Without them, its chunks have no header."""


def chunk_check(dataset: Any) -> Callable[[int, int], None] | None:
    """A check of the chunks of rows; None if not needed.

    It raises ValueError for a damaged chunk.
    """
    if dataset.chunks is None:
        return None
    settings = dataset.id.get_create_plist()
    filters = [settings.get_filter(number) for number in range(settings.get_nfilters())]
    nbytes = int(prod(dataset.chunks)) * int(dataset.id.get_type().get_size())
    check = _frame_check(filters, nbytes) if filters else None
    return None if check is None else _StoredChunks(dataset, nbytes, 1 << len(filters) - 1, check).check


def _frame_check(filters: list[Any], chunk_nbytes: int) -> Callable[[bytes], None] | None:
    """The check of the filter that reads a stored chunk first."""
    code, _, values, _ = filters[-1]
    # Other filters may change the size of the input of this filter.
    nbytes = chunk_nbytes if len(filters) == 1 else None
    if code == _BLOSC:
        return partial(check_blosc, expected_nbytes=nbytes)
    if code == _BITSHUFFLE and len(values) > 4 and values[4] in _COMPRESSIONS:
        return partial(check_bitshuffle, itemsize=values[2], expected_nbytes=nbytes)
    return None


class _StoredChunks:
    """Stored chunks of one dataset.

    `left_out` is the mask of a chunk without the last filter.

    The properties of a dataset are read from h5py once: each read takes as long as the check of a small chunk.
    """

    def __init__(self, dataset: Any, nbytes: int, left_out: int, check: Callable[[bytes], None]) -> None:
        self._id, self._nbytes, self._left_out, self._check = dataset.id, nbytes, left_out, check
        self._sizes, self._shape = dataset.chunks, dataset.shape

    def check(self, start: int, stop: int) -> None:
        """Raise ValueError if a chunk of these rows is damaged."""
        for place in self._places(start, stop):
            info = self._id.get_chunk_info_by_coord(place)
            written = info.byte_offset is not None  # h5py must not read any other chunk directly
            if written and not info.filter_mask & self._left_out and not self._may_be_plain(place, info.size):
                self._check(self._id.read_direct_chunk(place)[1])

    def _places(self, start: int, stop: int) -> Iterator[tuple[int, ...]]:
        """First elements of the chunks that hold these rows."""
        first, *others = self._sizes
        rows = range(start // first * first, stop, first)
        return product(rows, *(range(0, self._shape[axis], size) for axis, size in enumerate(others, 1)))

    def _may_be_plain(self, place: tuple[int, ...], nbytes: int) -> bool:
        """True for an unfiltered chunk at an edge.

        HDF5 may leave such chunks unfiltered, with the size of their data.
        """
        return nbytes == self._nbytes and any(
            at + size > length for at, size, length in zip(place, self._sizes, self._shape, strict=True)
        )


_ALIGNMENT = 8


class HeapFile(RangeFile):
    """A file for h5py; SampleError for a heap that breaks its format.

    Each heap is checked once. `size_nbytes` is the size of a length in this file, which the file states itself.
    """

    size_nbytes = 8

    def __init__(self, file: File) -> None:
        super().__init__(file)  # type: ignore[arg-type] # the next class in the MRO is a file object over a file
        self._name = file.name
        self._checked = set[int]()

    def read(self, size: int = -1, /) -> memoryview:
        at = self.tell()
        data = super().read(size)
        if data[: len(_HEAP_MAGIC)] == _HEAP_MAGIC and at not in self._checked:
            self._check(at)
            self._checked.add(at)
        return data

    def _check(self, at: int) -> None:
        header = _aligned(8 + self.size_nbytes)
        nbytes = int.from_bytes(self._bytes(at, min(at + header, self._nbytes))[8 : 8 + self.size_nbytes], "little")
        stop = at + nbytes
        if header <= nbytes and stop <= self._nbytes and not is_heap(self._bytes(at, stop), self.size_nbytes):
            raise SampleError(
                f"{self._name} is damaged: the heap of its strings and rows of variable length at byte {at} breaks the"
                " format of HDF5; copy it again"
            )


class RemoteHeapFile(HeapFile, BlockFile):
    """A remote file, read by cached blocks."""


class _MappedRanges(RangeFile):
    def __init__(self, file: LocalFile) -> None:
        super().__init__(file.nbytes)
        self._file = file

    def _bytes(self, start: int, stop: int) -> memoryview:
        return self._file.cut(start, stop)


class LocalHeapFile(HeapFile, _MappedRanges):
    """A file of this machine."""


def is_heap(data: memoryview, size_nbytes: int) -> bool:
    """True if a heap is a sequence of objects."""
    at = header = _aligned(8 + size_nbytes)
    stop = len(data)
    while at + header <= stop:
        nbytes = int.from_bytes(data[at + 8 : at + 8 + size_nbytes], "little")
        if data[at] or data[at + 1]:
            nbytes = header + _aligned(nbytes)
        elif not nbytes:
            return False
        at += nbytes
    return at <= stop


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
