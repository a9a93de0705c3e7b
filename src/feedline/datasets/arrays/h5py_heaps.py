"""Files for h5py whose global heaps are checked before HDF5 reads them.

HDF5 keeps strings and rows of variable length in global heaps: pages of objects that follow each other. It reads a
damaged page for ever if an object without a number has the size 0, as in a page of zeros.
"""

from __future__ import annotations

from feedline.datasets.file_objects import FarFile, RangeFile
from feedline.errors import SampleError
from feedline.stores.files import LocalFile, RemoteBlob

_MAGIC = b"GCOL"


_ALIGNMENT = 8


class HeapFile(RangeFile):
    """A file for h5py; SampleError for a heap that breaks its format.

    Each heap is checked once. `size_nbytes` is the size of a length in this file, which the file states itself.
    """

    size_nbytes = 8

    def __init__(self, blob: LocalFile | RemoteBlob) -> None:
        super().__init__(blob)  # type: ignore[arg-type] # the next class in the MRO is a file over a blob
        self._name = blob.name
        self._checked = set[int]()

    def read(self, size: int = -1, /) -> memoryview:
        at = self.tell()
        data = super().read(size)
        if data[: len(_MAGIC)] == _MAGIC and at not in self._checked:
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


class RemoteHeapFile(HeapFile, FarFile):
    """A remote file, read by cached blocks."""


class _MappedRanges(RangeFile):
    def __init__(self, blob: LocalFile) -> None:
        super().__init__(blob.nbytes)
        self._blob = blob

    def _bytes(self, start: int, stop: int) -> memoryview:
        return self._blob.cut(start, stop)


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
