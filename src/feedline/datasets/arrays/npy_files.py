"""Array files by number: local ones mapped, remote ones read in ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.core.paths import Pathlike
from feedline.datasets.arrays.npy_layout import NpyLayout, NpzMember, Raw, RowSpan, Source, layout_of, path_of
from feedline.datasets.paths import found
from feedline.errors import ArgumentError
from feedline.stores import Cache, CachedStore, ObjectRange
from feedline.stores.files import Extent, FileSet, local_info
from feedline.stores.local import RecheckTimer

_HEAD_NBYTES = 16 << 10
"""Bytes read for a header; NumPy refuses longer headers."""


class ArrayFiles:
    """Array files by number, read alike wherever they are.

    Files of this machine are mapped; rows of objects are read in ranges, concurrently. The constructor reads every
    header, so that damage shows at once. Safe to use from several threads; pickles by path and address, never by
    content.

    Each source is one file, unless `typed` is given: then a source may be a pattern or folder of several files, and
    `typed(name)` returns each as a path or `Raw`. Objects are kept in the folder `cache` if one is given; `options` are
    those of `open_store`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
        typed: Callable[[str], Pathlike | Raw] | None = None,
    ) -> None:
        if not sources:
            raise FileNotFoundError("no files: the list of paths is empty")
        matches = found([path_of(source) for source in sources], "*", cache=cache, options=options)
        self.blobs = FileSet([each for several in matches for each in several])
        origins = [source for source, several in zip(sources, matches, strict=True) for _ in several]
        if typed is None:
            _check_single_files(sources, list(map(len, matches)))
        named = [_named(source, name, typed) for source, name in zip(origins, self.blobs.names, strict=True)]
        self.layouts = self._read_layouts(named)
        self._maps: list[NDArray[Any]] | None = None
        self._looks = RecheckTimer()

    @property
    def is_local(self) -> bool:
        """True if all files are mapped."""
        return self.blobs.is_local

    @property
    def paths(self) -> list[str]:
        """Absolute path or address of each file."""
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

    @property
    def maps(self) -> list[NDArray[Any]]:
        """Read-only contents of local files; StateError names one that has changed."""
        maps = self._maps
        if maps is None:
            contents = self.blobs.read([Extent(number, 0, self.blobs.info(number).size) for number in self._numbers])
            maps = [_map(layout, content) for layout, content in zip(self.layouts, contents, strict=True)]
            self._maps = maps  # two threads may both map the files; either result is valid
        self._check_unchanged()
        return maps

    def read(self, spans: Sequence[RowSpan]) -> list[NDArray[Any]]:
        """Rows of the files, read-only: views of the maps, or fetched concurrently."""
        if self.is_local:
            maps = self.maps
            return [maps[file][start:stop] for file, start, stop in spans]
        views = self.blobs.read(self._extents(spans))
        return [self._array(span, view) for span, view in zip(spans, views, strict=True)]

    def ranges(self, spans: Iterable[RowSpan]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into the cache for `read`."""
        return [] if self.is_local else self.blobs.ranges(self._extents(spans))

    @property
    def _numbers(self) -> range:
        return range(len(self.layouts))

    def _check_unchanged(self) -> None:
        # A page beyond the new end of a truncated file would kill the process with SIGBUS.
        if not self._looks.due():
            return
        for info in map(self.blobs.info, self._numbers):
            with suppress(FileNotFoundError):  # a deleted file stays mapped
                info.state.check(local_info(info.path).state, info.path)
        self._looks.done()

    def _extents(self, spans: Iterable[RowSpan]) -> list[Extent]:
        extents = []
        for file, start, stop in spans:
            layout = self.layouts[file]
            nbytes = layout.row_nbytes
            extents.append(Extent(file, layout.offset + start * nbytes, layout.offset + stop * nbytes))
        return extents

    def _array(self, span: RowSpan, view: memoryview) -> NDArray[Any]:
        layout = self.layouts[span.file]
        return np.ndarray((span.stop - span.start, *layout.shape[1:]), layout.dtype, view)

    def _read_layouts(self, sources: Sequence[Source]) -> list[NpyLayout]:
        sizes = [self.blobs.info(number).size for number in range(len(sources))]
        heads = self.blobs.read(
            [_head(number, source, size) for number, (source, size) in enumerate(zip(sources, sizes, strict=True))]
        )
        layouts = [
            layout_of(source, path, BytesIO(head), size)
            for source, path, head, size in zip(sources, self.paths, heads, sizes, strict=True)
        ]
        if not self.is_local:
            for path, layout in zip(self.paths, layouts, strict=True):
                _check_row_order(path, layout)
        return layouts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}


def _named(source: Source, name: str, typed: Callable[[str], Pathlike | Raw] | None) -> Source:
    if isinstance(source, Raw):
        return replace(source, path=name)
    if isinstance(source, NpzMember):
        return source
    return typed(name) if typed else name


def _head(number: int, source: Source, size: int) -> Extent:
    """Bytes that hold the header of a source."""
    if isinstance(source, NpzMember):
        return Extent(number, source.start, source.start + min(source.nbytes, _HEAD_NBYTES))
    return Extent(number, 0, 0 if isinstance(source, Raw) else min(size, _HEAD_NBYTES))


def _map(layout: NpyLayout, content: memoryview) -> NDArray[Any]:
    # The array refers to the mapping, which thus ends with the last array of it.
    return np.ndarray(layout.shape, layout.dtype, content, layout.offset, order="F" if layout.fortran else "C")


def _check_single_files(sources: Sequence[Source], counts: Sequence[int]) -> None:
    for source, count in zip(sources, counts, strict=True):
        if count != 1:
            raise ArgumentError(f"{path_of(source)} matches {count} files: name one, or a list of aligned ones")


def _check_row_order(path: str, layout: NpyLayout) -> None:
    if layout.fortran and len(layout.shape) > 1:
        raise ArgumentError(
            f"{path} is in Fortran order (column by column), so that no byte range of it holds a row: write it again"
            " with numpy.save(path, numpy.ascontiguousarray(array)), or read a local copy"
        )
