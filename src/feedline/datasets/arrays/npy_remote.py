"""Array files in stores, read in ranges.

Layouts are read once, by the constructor; the rows of a batch are fetched concurrently.
"""

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
"""Bytes read for a header; NumPy refuses longer headers."""


TOGETHER_NBYTES = 4 << 20
"""Size of a range that one request reads about as quickly as a single row."""


def is_remote(sources: Iterable[Pathlike | Raw]) -> bool:
    """True if any source is in a store."""
    return any(not is_local(path_of(source)) for source in sources)


class RemoteArrays:
    """Array files by number, at least one of them in a store.

    Safe to use from several threads; pickles by address. Each source is one file, unless `typed` is given: then a
    source may be a pattern or folder of several files, and `typed(name)` returns each as a path or `Raw`. Objects are
    kept in the folder `cache` if one is given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        sources: Sequence[Pathlike | Raw],
        *,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
        typed: Callable[[str], Pathlike | Raw] | None = None,
    ) -> None:
        matches = found([path_of(source) for source in sources], "*", cache=cache, options=options)
        self.blobs = FileSet([each for several in matches for each in several])
        origins = [source for source, several in zip(sources, matches, strict=True) for _ in several]
        if typed is None:
            _check_single_files(sources, list(map(len, matches)))
        named = [
            replace(source, path=name) if isinstance(source, Raw) else typed(name) if typed else name
            for source, name in zip(origins, self.blobs.names, strict=True)
        ]
        self.layouts = self._read_layouts(named)

    @property
    def paths(self) -> list[str]:
        """Address of each file."""
        return self.blobs.names

    @property
    def lengths(self) -> list[int]:
        """Number of rows of each file."""
        return [layout.shape[0] for layout in self.layouts]

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """Dtype of each file."""
        return [layout.dtype for layout in self.layouts]

    @property
    def ndims(self) -> list[int]:
        """Number of dimensions of each file."""
        return [len(layout.shape) for layout in self.layouts]

    def __len__(self) -> int:
        """Number of rows of each file, where all are aligned."""
        return self.layouts[0].shape[0]

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Runs of rows that one request reads, for aligned files."""
        widest = max(_row_nbytes(layout) for layout in self.layouts)
        rows = max(1, TOGETHER_NBYTES // max(1, widest))
        return np.diff(np.append(np.arange(0, len(self), rows, dtype=np.int64), len(self)))

    def read(self, spans: Sequence[RowSpan]) -> list[NDArray[Any]]:
        """Rows of the files, read-only, fetched concurrently."""
        views = self.blobs.read(self.extents(spans))
        return [self._array(span, view) for span, view in zip(spans, views, strict=True)]

    def extents(self, spans: Iterable[RowSpan]) -> list[Extent]:
        """Byte ranges of these rows."""
        extents = []
        for file, start, stop in spans:
            layout = self.layouts[file]
            row_nbytes = _row_nbytes(layout)
            extents.append(Extent(file, layout.offset + start * row_nbytes, layout.offset + stop * row_nbytes))
        return extents

    def row(self, at: int) -> list[torch.Tensor]:
        """Copy row `at` of each file."""
        return [part[0] for part in self.take(np.array([at]), lambda shape, dtype: torch.empty(shape, dtype=dtype))]

    def take(self, indices: NDArray[np.int64], empty: Allocator) -> list[torch.Tensor]:
        """Rows of `indices` of each file, in memory from `empty`.

        IndexError names an invalid index.
        """
        places = within(indices, len(self), "ArrayFile").tolist()
        outs = [_out(layout, len(places), empty) for layout in self.layouts]
        read = iter(self.read(self._spans(places)))
        for out in map(numpy_view, outs):
            for row in range(len(places)):
                out[row] = next(read)[0]
        return outs

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into the cache for `take`."""
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
            _check_row_order(path, layout)
        return layouts


def _row_nbytes(layout: NpyLayout) -> int:
    return prod(layout.shape[1:]) * layout.dtype.itemsize


def _out(layout: NpyLayout, rows: int, empty: Allocator) -> torch.Tensor:
    dtype = torch_dtype(layout.dtype.newbyteorder("="))
    assert dtype is not None
    return empty((rows, *layout.shape[1:]), dtype)


def _check_single_files(sources: Sequence[Pathlike | Raw], counts: Sequence[int]) -> None:
    for source, count in zip(sources, counts, strict=True):
        if count != 1:
            raise ArgumentError(f"{path_of(source)} matches {count} files: name one, or a list of aligned ones")


def _check_row_order(path: str, layout: NpyLayout) -> None:
    if layout.fortran and len(layout.shape) > 1:
        raise ArgumentError(
            f"{path} is in Fortran order (column by column), so that no byte range of it holds a row: write it again"
            " with numpy.save(path, numpy.ascontiguousarray(array)), or read a local copy"
        )
