"""Array files in stores: their layouts are known, their rows are read in ranges, as many as are wanted at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.tensors import Allocator, numpy_view, torch_dtype, within
from feedline.datasets.arrays.npy_layout import NpyLayout, Pathlike, Raw, RowSpan, layout_of, path_of
from feedline.datasets.paths import found
from feedline.errors import ArgumentError
from feedline.stores import Cache, CachedStore, ObjectRange
from feedline.stores.files import Extent, FileSet
from feedline.stores.urls import is_local

_HEAD_NBYTES = 16 << 10
"""NumPy refuses longer headers."""


TOGETHER_NBYTES = 4 << 20
"""So much of an object is read by one request about as quickly as one row."""


def is_remote(sources: Iterable[Pathlike | Raw]) -> bool:
    """Whether any of these lies in a store."""
    return any(not is_local(path_of(source)) for source in sources)


class RemoteArrays:
    """Array files by number, at least one of them in a store. Safe to use from several threads; pickles by address.

    Each source is one file; with `typed`, which says how the file of a name is to be read, patterns and folders are all
    that they stand for. What a store gives is kept in the folder `cache`, if one is given; `options` are those of
    `open_store`.
    """

    def __init__(
        self,
        sources: Sequence[Pathlike | Raw],
        *,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
        typed: Callable[[str], Pathlike | Raw] | None = None,
    ) -> None:
        meant = found([path_of(source) for source in sources], "*", cache=cache, options=options)
        self.blobs = FileSet([each for several in meant for each in several])
        whose = [source for source, several in zip(sources, meant, strict=True) for _ in several]
        if typed is None:
            _refuse_several(sources, list(map(len, meant)))
        named = [
            replace(source, path=name) if isinstance(source, Raw) else typed(name) if typed else name
            for source, name in zip(whose, self.blobs.names, strict=True)
        ]
        self.layouts = self._read_layouts(named)

    @property
    def paths(self) -> list[str]:
        """The address of each file."""
        return self.blobs.names

    @property
    def lengths(self) -> list[int]:
        """The rows of each file."""
        return [layout.shape[0] for layout in self.layouts]

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """The dtype of each file."""
        return [layout.dtype for layout in self.layouts]

    @property
    def ndims(self) -> list[int]:
        """The dimensions of each file."""
        return [len(layout.shape) for layout in self.layouts]

    def __len__(self) -> int:
        """The rows of each file, where all are aligned."""
        return self.layouts[0].shape[0]

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Runs of rows that one request brings as easily as one row, where all files are aligned."""
        widest = max(_row_nbytes(layout) for layout in self.layouts)
        rows = max(1, TOGETHER_NBYTES // max(1, widest))
        return np.diff(np.append(np.arange(0, len(self), rows, dtype=np.int64), len(self)))

    def read(self, spans: Sequence[RowSpan]) -> list[NDArray[Any]]:
        """Rows of the files, read-only, all at once."""
        views = self.blobs.read(self.extents(spans))
        return [self._array(span, view) for span, view in zip(spans, views, strict=True)]

    def extents(self, spans: Iterable[RowSpan]) -> list[Extent]:
        """Where in the objects these rows lie."""
        found = []
        for file, start, stop in spans:
            layout = self.layouts[file]
            row_nbytes = _row_nbytes(layout)
            found.append(Extent(file, layout.offset + start * row_nbytes, layout.offset + stop * row_nbytes))
        return found

    def row(self, at: int) -> list[torch.Tensor]:
        """Row `at` of each file, copied."""
        return [part[0] for part in self.take(np.array([at]), lambda shape, dtype: torch.empty(shape, dtype=dtype))]

    def take(self, indices: NDArray[np.int64], empty: Allocator) -> list[torch.Tensor]:
        """The rows of these indices of each file, in memory from `empty`; IndexError names one out of range."""
        places = within(indices, len(self), "ArrayFile").tolist()
        outs = [_out(layout, len(places), empty) for layout in self.layouts]
        read = iter(self.read(self._spans(places)))
        for out in map(numpy_view, outs):
            for row in range(len(places)):
                out[row] = next(read)[0]
        return outs

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """What a prefetch has to bring into the cache for `take`."""
        places = within(indices, len(self), "ArrayFile").tolist()
        return self.blobs.ranges(self.extents(self._spans(places)))

    def _spans(self, places: Sequence[int]) -> list[RowSpan]:
        return [RowSpan(file, at, at + 1) for file in range(len(self.layouts)) for at in places]

    def _array(self, span: RowSpan, view: memoryview) -> NDArray[Any]:
        layout = self.layouts[span.file]
        return np.ndarray((span.stop - span.start, *layout.shape[1:]), layout.dtype, view)

    def _read_layouts(self, sources: Sequence[Pathlike | Raw]) -> list[NpyLayout]:
        sizes = [self.blobs.info(number).size for number in range(len(sources))]
        ends = [
            0 if isinstance(source, Raw) else min(size, _HEAD_NBYTES)
            for source, size in zip(sources, sizes, strict=True)
        ]
        heads = self.blobs.read([Extent(number, 0, end) for number, end in enumerate(ends)])
        layouts = [
            layout_of(source, path, BytesIO(head), size)
            for source, path, head, size in zip(sources, self.paths, heads, sizes, strict=True)
        ]
        for path, layout in zip(self.paths, layouts, strict=True):
            _refuse_columns(path, layout)
        return layouts


def _row_nbytes(layout: NpyLayout) -> int:
    return prod(layout.shape[1:]) * layout.dtype.itemsize


def _out(layout: NpyLayout, rows: int, empty: Allocator) -> torch.Tensor:
    dtype = torch_dtype(layout.dtype.newbyteorder("="))
    assert dtype is not None
    return empty((rows, *layout.shape[1:]), dtype)


def _refuse_several(sources: Sequence[Pathlike | Raw], counts: Sequence[int]) -> None:
    for source, count in zip(sources, counts, strict=True):
        if count != 1:
            raise ArgumentError(f"{path_of(source)} stands for {count} files: name one, or a list of aligned ones")


def _refuse_columns(path: str, layout: NpyLayout) -> None:
    if layout.fortran and len(layout.shape) > 1:
        raise ArgumentError(
            f"{path} is in Fortran order, column by column, so that no range of it holds a row: write it anew with"
            " numpy.save(path, numpy.ascontiguousarray(array)), or read a copy of it on this machine"
        )
