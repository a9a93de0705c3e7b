"""Items of many chunks as one array, and redirected chunks.

`ScatteredItems` gathers from all chunks in one pass. `redirect` resolves dictionary-encoded and multi-part chunks to
the chunks that hold their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.kernels import Int64s, gather_rows, gather_windows
from feedline.core.tensors import Allocator, numpy_view, torch_dtype
from feedline.datasets.tables.chunks import DictionaryChunk, ItemSpan, PartedChunk, items, null_chunk
from feedline.datasets.tables.types import ColumnType


class _MemoryAt:
    """Memory at an address, for numpy; does not keep it alive."""

    def __init__(self, address: int, length: int, dtype: np.dtype[Any]) -> None:
        # Read-only (True): the memory may be a mapped file, or the table of a user.
        self.__array_interface__ = {
            "version": 3, "data": (address, True), "shape": (length,), "typestr": dtype.str,
        }  # fmt: skip


class ScatteredItems:
    """Items of several chunks as one array.

    Item i of chunk c is `view[starts[c] + i]`. One gather then replaces one per chunk.
    The view spans from the chunk at the lowest address to that at the highest.
    The addresses between chunks may be unmapped: read items of chunks only.
    """

    __slots__ = ("_chunks", "dtype", "starts", "view")

    def __init__(self, chunks: Sequence[ItemSpan], dtype: np.dtype[Any]) -> None:
        assert all(chunk.array.dtype == dtype for chunk in chunks)
        self._chunks = _aligned(chunks, dtype)  # keeps the memory valid
        self.dtype = dtype
        if len(chunks) == 1:
            self.view, self.starts = self._chunks[0].array, np.zeros(1, np.int64)
            return
        filled = [chunk for chunk in self._chunks if len(chunk.array)]
        base = min((chunk.address for chunk in filled), default=0)
        end = max((chunk.address + chunk.array.nbytes for chunk in filled), default=0)
        self.view = np.asarray(_MemoryAt(base, (end - base) // dtype.itemsize, dtype)) if filled else np.empty(0, dtype)
        addresses = np.array([chunk.address if len(chunk.array) else base for chunk in self._chunks], np.int64)
        self.starts = (addresses - base) // dtype.itemsize

    @classmethod
    def of_all(cls, several: Sequence[ScatteredItems]) -> ScatteredItems:
        """Chunks of all columns, in order, of one dtype."""
        return cls(list(chain.from_iterable(each._chunks for each in several)), several[0].dtype)

    def at(self, which: Int64s, places: Int64s) -> NDArray[Any]:
        """The items at `places` of the chunks `which`. Places are not checked."""
        return gather_rows(self.view, self.starts[which] + places)

    def windows(self, which: Int64s, places: Int64s, shape: tuple[int, ...], allocate: Allocator) -> torch.Tensor:
        """One row of `shape` per place, starting there, in memory from `allocate`."""
        dtype = torch_dtype(self.dtype)
        assert dtype is not None
        out = allocate((len(places), *shape), dtype)
        width = prod(shape)
        if not out.numel():
            return out
        begin = self.starts[which] + places
        if width == 1:
            gather_rows(self.view, begin, out=numpy_view(out).reshape(-1))
        else:
            gather_windows(self.view, begin, numpy_view(out).reshape(-1, width))
        return out

    def runs(self, which: Int64s, starts: Int64s, stops: Int64s) -> tuple[torch.Tensor, list[int]]:
        """The items `[start, stop)` of all rows, concatenated, and their lengths."""
        lengths = (stops - starts).tolist()
        out = np.empty(sum(lengths), self.dtype)
        begin, filled = (self.starts[which] + starts).tolist(), 0
        # Runs are copied into one new array, so that no sample keeps a chunk in memory.
        for first, length in zip(begin, lengths, strict=True):
            out[filled : filled + length] = self.view[first : first + length]
            filled += length
        return torch.from_numpy(out), lengths


def _aligned(chunks: Sequence[ItemSpan], dtype: np.dtype[Any]) -> list[ItemSpan]:
    """Copy the chunks whose address is not aligned to the item size."""
    copied = []
    for chunk in chunks:
        if chunk.address % dtype.itemsize:
            array = chunk.array.copy()
            copied.append(ItemSpan(array, array.__array_interface__["data"][0]))
        else:
            copied.append(chunk)
    return copied


Redirection = Callable[[Int64s, Int64s], tuple[Int64s, Int64s]]
"""Maps (chunk, row) pairs to the pairs that hold their values."""


CellErrorFactory = Callable[[int, str], Exception]
"""Builds an error from a position among the requested rows and a problem."""


class Redirected(NamedTuple):
    """The chunks that hold the values, and the mapping to their rows."""

    chunks: Sequence[Any]
    redirection: Redirection


def redirect(kind: ColumnType, chunks: Sequence[Any], error: CellErrorFactory) -> Redirected | None:
    """Resolve multi-part and dictionary-encoded chunks; None without any.

    Removes only one level: the chunks of the result may need redirection, too.
    """
    types = set(map(type, chunks))  # one pass, for thousands of chunks that rarely need redirection
    if PartedChunk in types:
        parts = [list(chunk.parts) if isinstance(chunk, PartedChunk) else [chunk] for chunk in chunks]
        return Redirected(list(chain.from_iterable(parts)), _PartedColumns(chunks))
    if DictionaryChunk in types:
        values = [chunk.values if isinstance(chunk, DictionaryChunk) else chunk for chunk in chunks]
        redirection = _DictionaryRows(chunks, error)
        return Redirected([*values, null_chunk(kind, 1)] if redirection.has_nulls else values, redirection)
    return None


class _PartedColumns:
    """Redirection of chunks that may have several parts."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._bounds = [chunk.bounds if isinstance(chunk, PartedChunk) else None for chunk in chunks]
        counts = [1 if bounds is None else len(bounds) - 1 for bounds in self._bounds]
        self._first = np.cumsum([0, *counts])

    def __call__(self, which: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
        parts, places = self._first[which], rows.copy()
        for number in np.unique(which).tolist():
            bounds = self._bounds[number]
            if bounds is not None:
                positions = np.flatnonzero(which == number)
                at = np.searchsorted(bounds, rows[positions], side="right") - 1
                parts[positions] += at
                places[positions] -= bounds[at]
        return parts, places


class _DictionaryRows:
    """Redirection of chunks that may be dictionary-encoded.

    Nulls are mapped to row 0 of an extra chunk after the chunks of values.
    """

    def __init__(self, chunks: Sequence[Any], error: CellErrorFactory) -> None:
        coded = [chunk for chunk in chunks if isinstance(chunk, DictionaryChunk)]
        self._number = np.array([isinstance(chunk, DictionaryChunk) for chunk in chunks]).cumsum() - 1
        self._plain = np.array([not isinstance(chunk, DictionaryChunk) for chunk in chunks])
        self._codes = scattered([chunk.places for chunk in coded])
        self._lengths = np.array([chunk.length for chunk in coded])
        self._lowest = -np.array([chunk.has_nulls for chunk in coded], np.int64)
        self.has_nulls, self._has_plain = bool(self._lowest.any()), bool(self._plain.any())
        self._error = error

    def __call__(self, which: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
        if not self._has_plain:
            return self._look_up(which, which, rows)
        coded = np.flatnonzero(~self._plain[which])
        chunks, places = which.copy(), rows.copy()
        chunks[coded], places[coded] = self._look_up(which[coded], self._number[which[coded]], rows[coded], coded)
        return chunks, places

    def _look_up(
        self, which: Int64s, numbers: Int64s, rows: Int64s, positions: Int64s | None = None
    ) -> tuple[Int64s, Int64s]:
        """Read the codes of dictionary-encoded rows and check them.

        `numbers` counts the dictionary-encoded chunks only. `positions` are the positions of the rows in the request,
        for errors; None if all rows are dictionary-encoded.
        """
        codes = self._codes.at(numbers, rows).astype(np.int64)
        # Mapped files are not validated: with a code outside of the dictionary, foreign memory would be read.
        outside = codes >= self._lengths[numbers]
        outside |= codes < (self._lowest[numbers] if self.has_nulls else 0)
        if outside.any():
            at = int(outside.argmax())
            raise self._error(
                at if positions is None else int(positions[at]),
                f"has code {codes[at]} in a dictionary of {self._lengths[numbers[at]]} values: the file is damaged;"
                " re-create it or leave it out",
            )
        if not self.has_nulls:
            return which, codes
        return np.where(codes < 0, len(self._plain), which), np.maximum(codes, 0)


def scattered(arrays: Sequence[ItemSpan]) -> ScatteredItems:
    """Codes or offsets of all chunks, as int64 if their widths differ."""
    dtypes = {each.array.dtype for each in arrays}
    if len(dtypes) == 1:
        return ScatteredItems(arrays, dtypes.pop())
    return ScatteredItems([items(each.array.astype(np.int64)) for each in arrays], np.dtype(np.int64))
