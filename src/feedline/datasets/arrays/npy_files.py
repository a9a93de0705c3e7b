"""Array files: where they are, and the layout of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from math import prod
from typing import Any

import numpy as np

from feedline.core.paths import Pathlike
from feedline.datasets.arrays.npy_layout import NpySource, NpzMember, Raw, layout_of, path_of
from feedline.datasets.arrays.rows import ArrayLayout, FileArrays
from feedline.datasets.paths import find_each, no_files_error
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import Extent, FileSet

_HEAD_NBYTES = 16 << 10
"""Bytes read for a header; NumPy refuses longer headers."""


class ArrayFiles(FileArrays):
    """Arrays of `.npy` files, stored members of archives, and files of numbers.

    The constructor reads every header, so that damage shows at once.

    Each source is one file, unless `typed` is given: then a source may be a pattern or folder of several files, and
    `typed(name)` returns each as a path or `Raw`. Objects are kept in the folder `cache` if one is given; `options` are
    passed to `open_store`.
    """

    def __init__(
        self,
        sources: Sequence[NpySource],
        *,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
        typed: Callable[[str], Pathlike | Raw] | None = None,
    ) -> None:
        if not sources:
            raise no_files_error()
        matches = find_each([path_of(source) for source in sources], "*", cache=cache, options=options)
        files = FileSet([each for several in matches for each in several])
        origins = [source for source, several in zip(sources, matches, strict=True) for _ in several]
        if typed is None:
            _check_single_files(sources, list(map(len, matches)))
        named = [_named(source, name, typed) for source, name in zip(origins, files.names, strict=True)]
        super().__init__(files, _read_layouts(files, named))

    @property
    def is_local(self) -> bool:
        """True if all files are mapped."""
        return self.files.is_local

    @property
    def paths(self) -> list[str]:
        """Absolute path or address of each file."""
        return self.files.names

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


def _read_layouts(files: FileSet, sources: Sequence[NpySource]) -> list[ArrayLayout]:
    sizes = [files.info(number).size for number in range(len(sources))]
    heads = files.read([_head(number, *each) for number, each in enumerate(zip(sources, sizes, strict=True))])
    layouts = [
        layout_of(source, path, BytesIO(head), size)
        for source, path, head, size in zip(sources, files.names, heads, sizes, strict=True)
    ]
    for number, layout in enumerate(layouts):
        if files.store(number) is not None:
            _check_row_order(files.name(number), layout)
    _check_alone(files, layouts, [_stop(*each) for each in zip(sources, sizes, strict=True)])
    return layouts


_EXAMINED_NBYTES = 4096


def _check_alone(files: FileSet, layouts: Sequence[ArrayLayout], stops: Sequence[int]) -> None:
    """Raise SampleError for data behind an array; zeros are allowed."""
    ends = [layout.offset + prod(layout.shape) * layout.dtype.itemsize for layout in layouts]
    longer = [number for number, (end, stop) in enumerate(zip(ends, stops, strict=True)) if end < stop]
    behind = files.read([Extent(n, ends[n], min(stops[n], ends[n] + _EXAMINED_NBYTES)) for n in longer])
    for number, data in zip(longer, behind, strict=True):
        if bytes(data).strip(b"\0"):
            raise SampleError(
                f"{files.name(number)} has {stops[number] - ends[number]} bytes behind its array of shape"
                f" {layouts[number].shape}, which would be left out: were several arrays saved in one file, or rows"
                " appended without a new header? Save each array in a file of its own"
            )


def _stop(source: NpySource, size: int) -> int:
    """End of a source's bytes in its file."""
    return source.start + source.nbytes if isinstance(source, NpzMember) else size


def _named(source: NpySource, name: str, typed: Callable[[str], Pathlike | Raw] | None) -> NpySource:
    if isinstance(source, Raw):
        return replace(source, path=name)
    if isinstance(source, NpzMember):
        return source
    return typed(name) if typed else name


def _head(number: int, source: NpySource, size: int) -> Extent:
    """Bytes that hold the header of a source."""
    if isinstance(source, NpzMember):
        return Extent(number, source.start, source.start + min(source.nbytes, _HEAD_NBYTES))
    return Extent(number, 0, 0 if isinstance(source, Raw) else min(size, _HEAD_NBYTES))


def _check_single_files(sources: Sequence[NpySource], counts: Sequence[int]) -> None:
    for source, count in zip(sources, counts, strict=True):
        if count != 1:
            raise ArgumentError(f"{path_of(source)} matches {count} files: name one, or a list of aligned ones")


def _check_row_order(path: str, layout: ArrayLayout) -> None:
    if layout.fortran and len(layout.shape) > 1:
        raise ArgumentError(
            f"{path} is in Fortran order (column by column), so no byte range of it holds a row: write it again"
            " with numpy.save(path, numpy.ascontiguousarray(array)), or read a local copy"
        )
