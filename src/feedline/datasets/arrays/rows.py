"""Rows of aligned arrays, in memory or in files.

Files of this machine are mapped. Rows of objects are read in ranges, concurrently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.core import kernels
from feedline.core.stage_parts import READ_FILES, Part
from feedline.core.tensors import normalize_indices
from feedline.stores import CachedStore, ObjectRange
from feedline.stores.files import Extent, File, FileSet
from feedline.stores.local import RecheckTimer


class ArrayLayout(NamedTuple):
    """Dtype, shape, order and byte offset of an array in a file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int

    @property
    def row_nbytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize


class RowSpan(NamedTuple):
    """Rows [start, stop) of one array, by its number."""

    array: int
    start: int
    stop: int


class RowSource(Protocol):
    """Arrays by number, whose first dimension counts samples."""

    def row(self, at: int) -> list[NDArray[Any]]:
        """Row `at` of each array, without its first dimension.

        StateError if a file has changed.
        """
        ...

    def fill(self, places: NDArray[np.int64], outs: Sequence[NDArray[Any]]) -> None:
        """Copy the rows at `places` of each array to `outs`.

        The stored bytes are copied unchanged: `outs` may have another dtype of the same size. Negative places count
        from the end. IndexError names an invalid place.
        """
        ...

    def row_ranges(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into a cache for `fill`."""
        ...


class MemoryArrays:
    """Arrays in memory, by number."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._arrays = arrays

    @property
    def arrays(self) -> Sequence[NDArray[Any]]:
        """All arrays."""
        return self._arrays

    def row(self, at: int) -> list[NDArray[Any]]:
        """See `RowSource`."""
        return [array[at, ...] for array in self.arrays]

    def fill(self, places: NDArray[np.int64], outs: Sequence[NDArray[Any]]) -> None:
        """See `RowSource`."""
        for array, out in zip(self.arrays, outs, strict=True):
            _gather(array, places, out)

    def row_ranges(self, _: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """No ranges; see `RowSource`."""
        return []


class _Mapped(NamedTuple):
    files: list[File]
    arrays: list[NDArray[Any] | None]


class FileArrays:
    """Arrays in files of a file set, by number: one in each.

    Safe to use from several threads; pickles by path and address, never by content.
    """

    def __init__(self, files: FileSet, layouts: Sequence[ArrayLayout]) -> None:
        self.files, self.layouts = files, layouts
        self._remote = [number for number in range(len(layouts)) if files.store(number) is not None]
        self._mapped: _Mapped | None = None
        self._recheck = RecheckTimer()

    @property
    def arrays(self) -> list[NDArray[Any] | None]:
        """The arrays of local files, read-only; None for arrays of objects.

        StateError names a file that has changed.
        """
        mapped = self._mapped
        if mapped is None:  # no lock: two threads may both map the files; either result is valid
            mapped = self._mapped = self._map()
        if self._recheck.is_due():
            # Without the file set, whose files a forked process opens again: a removed file stays mapped in forked
            # processes.
            for file in mapped.files:
                file.check_unchanged(at_once=True)
            self._recheck.done()
        return mapped.arrays

    def row(self, at: int) -> list[NDArray[Any]]:
        """See `RowSource`."""
        if self._remote:
            rows = self.read([RowSpan(number, at, at + 1) for number in range(len(self.layouts))])
            return [row[0, ...] for row in rows]
        return [array[at, ...] for array in self.arrays if array is not None]

    def read(self, spans: Sequence[RowSpan]) -> list[NDArray[Any]]:
        """Views of the mapped arrays, or rows that are fetched concurrently."""
        arrays = self.arrays
        remote = [span for span in spans if arrays[span.array] is None]
        fetched = map(self._rows, remote, self.files.read(self._extents(remote)) if remote else ())
        return [
            next(fetched) if (array := arrays[number]) is None else array[start:stop] for number, start, stop in spans
        ]

    def fill(self, places: NDArray[np.int64], outs: Sequence[NDArray[Any]]) -> None:
        """See `RowSource`. Rows of all objects are fetched concurrently."""
        fetched = iter(self.files.read(self._extents(self._row_spans(places))) if self._remote else ())
        for array, out in zip(self.arrays, outs, strict=True):
            if array is None:
                _write(islice(fetched, len(places)), out)
            else:
                _gather(array, places, out, READ_FILES)

    def ranges(self, spans: Iterable[RowSpan]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into a cache for `read`."""
        return [] if self.files.is_local else self.files.ranges(self._extents(spans))

    def row_ranges(self, places: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """See `RowSource`."""
        return self.ranges(self._row_spans(places)) if self._remote else []

    def _row_spans(self, places: NDArray[np.int64]) -> list[RowSpan]:
        """The rows at `places` of one object after another."""
        rows = normalize_indices(places, self.layouts[0].shape[0], self.files.name(0)).tolist()
        return [RowSpan(number, row, row + 1) for number in self._remote for row in rows]

    def _extents(self, spans: Iterable[RowSpan]) -> list[Extent]:
        extents = []
        for number, start, stop in spans:
            layout = self.layouts[number]
            nbytes = layout.row_nbytes
            extents.append(Extent(number, layout.offset + start * nbytes, layout.offset + stop * nbytes))
        return extents

    def _rows(self, span: RowSpan, view: memoryview) -> NDArray[Any]:
        layout = self.layouts[span.array]
        return np.ndarray((span.stop - span.start, *layout.shape[1:]), layout.dtype, view)

    def _map(self) -> _Mapped:
        mapped = _Mapped([], [])
        for number, layout in enumerate(self.layouts):
            file = None if number in self._remote else self.files[number]
            if file is not None and file.data is not None:
                mapped.files.append(file)
                order: Any = "F" if layout.fortran else "C"
                mapped.arrays.append(np.ndarray(layout.shape, layout.dtype, file.data, layout.offset, order=order))
            else:
                mapped.arrays.append(None)
        return mapped

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}


def _gather(array: NDArray[Any], places: NDArray[np.int64], out: NDArray[Any], part: Part | None = None) -> None:
    kernels.gather_rows(array if array.dtype == out.dtype else array.view(out.dtype), places, out=out, part=part)


def _write(rows: Iterable[memoryview], out: NDArray[Any]) -> None:
    """Write the bytes of one row after another to a contiguous array."""
    data, at = out.reshape(-1).view(np.uint8).data, 0
    for row in rows:
        data[at : at + len(row)] = row
        at += len(row)
