"""Chunks of HDF5 datasets that are checked before a plugin decompresses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import prod
from typing import Any

from feedline.datasets.arrays.frames import check_bitshuffle, check_blosc

_BLOSC, _BITSHUFFLE = 32001, 32008


_COMPRESSIONS = 2, 3
"""LZ4 and Zstandard of bitshuffle. Without them, its chunks have no header."""


def chunk_check(dataset: Any) -> Callable[[int, int], None] | None:
    """A function that checks the chunks of rows; None for a dataset that needs none.

    It raises ValueError for a damaged chunk.
    """
    if dataset.chunks is None:
        return None
    settings = dataset.id.get_create_plist()
    filters = [settings.get_filter(number) for number in range(settings.get_nfilters())]
    check = _frame_check(dataset, filters) if filters else None
    return None if check is None else partial(_check_chunks, dataset, len(filters), check)


def _frame_check(dataset: Any, filters: list[Any]) -> Callable[[bytes], None] | None:
    """The check of the filter that reads a stored chunk first."""
    code, _, values, _ = filters[-1]
    # Other filters may change the size that this one sees.
    nbytes = _chunk_nbytes(dataset) if len(filters) == 1 else None
    if code == _BLOSC:
        return partial(check_blosc, expected_nbytes=nbytes)
    if code == _BITSHUFFLE and len(values) > 4 and values[4] in _COMPRESSIONS:
        return partial(check_bitshuffle, itemsize=values[2], expected_nbytes=nbytes)
    return None


def _check_chunks(dataset: Any, num_filters: int, check: Callable[[bytes], None], start: int, stop: int) -> None:
    for place in _places(dataset, start, stop):
        info = dataset.id.get_chunk_info_by_coord(place)
        filtered = not info.filter_mask >> num_filters - 1 & 1
        # HDF5 can leave chunks at the edges as they are.
        whole = all(at + size <= length for at, size, length in zip(place, dataset.chunks, dataset.shape, strict=True))
        if info.byte_offset is not None and filtered and (whole or info.size != _chunk_nbytes(dataset)):
            check(dataset.id.read_direct_chunk(place)[1])


def _places(dataset: Any, start: int, stop: int) -> Iterator[tuple[int, ...]]:
    """First elements of the chunks that hold these rows."""
    sizes = dataset.chunks
    rows = range(start // sizes[0] * sizes[0], stop, sizes[0])
    others = (range(0, length, size) for length, size in zip(dataset.shape[1:], sizes[1:], strict=True))
    return product(rows, *others)


def _chunk_nbytes(dataset: Any) -> int:
    return int(prod(dataset.chunks)) * int(dataset.id.get_type().get_size())
