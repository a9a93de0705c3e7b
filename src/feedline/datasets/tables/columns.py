"""Columns of many chunks: rows of any of them as tensors, texts, lists and dicts.

Chunks whose rows lie in other chunks: behind the numbers of a dictionary, or in one of several parts.

Many arrays seen as one, so that rows of all of them are gathered in a single pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import collate
from feedline.core import kernels
from feedline.core.tensors import Allocator, allocate_tensor, numpy_view, torch_dtype
from feedline.datasets.tables.chunks import (
    DictionaryChunk,
    ItemSpan,
    NumberChunk,
    PartedChunk,
    RaggedChunk,
    StructChunk,
    items,
    nothing,
    row_count,
)
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import ColumnType, ListType, NumberType, StructType, TextType
from feedline.errors import SampleError

Int64s = NDArray[np.int64]


class _Memory:
    """The memory from one address on, for numpy; whoever looks at it keeps alive what lies there."""

    def __init__(self, address: int, length: int, dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (address, True), "shape": (length,), "typestr": dtype.str,
        }  # fmt: skip


class ScatteredItems:
    """Items of several chunks behind one array: item i of chunk c is `view[starts[c] + i]`.

    The view reaches from the first chunk's memory to the last one's. What lies between them may not be memory at all,
    so only items of chunks may be touched; that is what makes one gather out of thousands of small ones.
    """

    __slots__ = ("_chunks", "dtype", "starts", "view")

    def __init__(self, chunks: Sequence[ItemSpan], dtype: np.dtype[Any]) -> None:
        assert all(chunk.array.dtype == dtype for chunk in chunks)
        self._chunks = _aligned(chunks, dtype)  # keeps the memory alive
        self.dtype = dtype
        if len(chunks) == 1:
            self.view, self.starts = self._chunks[0].array, np.zeros(1, np.int64)
            return
        filled = [chunk for chunk in self._chunks if len(chunk.array)]
        base = min((chunk.address for chunk in filled), default=0)
        end = max((chunk.address + chunk.array.nbytes for chunk in filled), default=0)
        self.view = np.asarray(_Memory(base, (end - base) // dtype.itemsize, dtype)) if filled else np.empty(0, dtype)
        addresses = np.array([chunk.address if len(chunk.array) else base for chunk in self._chunks], np.int64)
        self.starts = (addresses - base) // dtype.itemsize

    def at(self, which: Int64s, places: Int64s) -> NDArray[Any]:
        """The items at `places` of the chunks `which`, which must be there."""
        return kernels.gather_rows(self.view, self.starts[which] + places)

    def windows(self, which: Int64s, places: Int64s, shape: tuple[int, ...], empty: Allocator) -> torch.Tensor:
        """For each place, the items from there on as a row of `shape`, in memory from `empty`."""
        dtype = torch_dtype(self.dtype)
        assert dtype is not None
        out = empty((len(places), *shape), dtype)
        width = prod(shape)
        if not out.numel():
            return out
        begin = self.starts[which] + places
        if width == 1:
            kernels.gather_rows(self.view, begin, out=numpy_view(out).reshape(-1))
        else:
            kernels.gather_windows(self.view, begin, numpy_view(out).reshape(-1, width))
        return out

    def runs(self, which: Int64s, starts: Int64s, stops: Int64s) -> tuple[torch.Tensor, list[int]]:
        """The items `[start, stop)` of each row end to end, and the length of each."""
        lengths = (stops - starts).tolist()
        out = np.empty(sum(lengths), self.dtype)
        begin, filled = (self.starts[which] + starts).tolist(), 0
        for first, length in zip(begin, lengths, strict=True):
            out[filled : filled + length] = self.view[first : first + length]
            filled += length
        return torch.from_numpy(out), lengths


def _aligned(chunks: Sequence[ItemSpan], dtype: np.dtype[Any]) -> list[ItemSpan]:
    """The chunks, those copied whose items do not lie on whole multiples of the item's size."""
    copied = []
    for chunk in chunks:
        if chunk.address % dtype.itemsize:
            array = chunk.array.copy()
            copied.append(ItemSpan(array, array.__array_interface__["data"][0]))
        else:
            copied.append(chunk)
    return copied


Redirection = Callable[[Int64s, Int64s], tuple[Int64s, Int64s]]
"""From the chunks that rows lie in, and the rows, to those of the other chunks."""


Wrong = Callable[[int, str], Exception]
"""What to raise: which of the rows that are asked for it is, and what is wrong with it."""


class Redirected(NamedTuple):
    """Other chunks, and where rows lie in them."""

    chunks: Sequence[Any]
    redirection: Redirection


def redirected(kind: ColumnType, chunks: Sequence[Any], wrong: Wrong) -> Redirected | None:
    """The chunks that hold the rows of these; None if these do."""
    found = set(map(type, chunks))  # there may be thousands, and almost never one of these
    if PartedChunk in found:
        parts = [list(chunk.parts) if isinstance(chunk, PartedChunk) else [chunk] for chunk in chunks]
        return Redirected(list(chain.from_iterable(parts)), _Parts(chunks))
    if DictionaryChunk in found:
        values = [chunk.values if isinstance(chunk, DictionaryChunk) else chunk for chunk in chunks]
        redirection = _DictionaryRows(chunks, wrong)
        return Redirected([*values, nothing(kind, 1)] if redirection.has_nulls else values, redirection)
    return None


class _Parts:
    """Rows of chunks of which some come in parts."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._bounds = [chunk.bounds if isinstance(chunk, PartedChunk) else None for chunk in chunks]
        counts = [1 if bounds is None else len(bounds) - 1 for bounds in self._bounds]
        self._first = np.cumsum([0, *counts])

    def __call__(self, which: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
        parts, places = self._first[which], rows.copy()
        for number in np.unique(which).tolist():
            bounds = self._bounds[number]
            if bounds is not None:
                mine = np.flatnonzero(which == number)
                at = np.searchsorted(bounds, rows[mine], side="right") - 1
                parts[mine] += at
                places[mine] -= bounds[at]
        return parts, places


class _DictionaryRows:
    """Rows of chunks of which some are numbers of values; nulls are in one that comes behind all values."""

    def __init__(self, chunks: Sequence[Any], wrong: Wrong) -> None:
        coded = [chunk for chunk in chunks if isinstance(chunk, DictionaryChunk)]
        self._number = np.array([isinstance(chunk, DictionaryChunk) for chunk in chunks]).cumsum() - 1
        self._plain = np.array([not isinstance(chunk, DictionaryChunk) for chunk in chunks])
        self._codes = _span([chunk.places for chunk in coded])
        self._lengths = np.array([chunk.length for chunk in coded])
        self._lowest = -np.array([chunk.has_nulls for chunk in coded], np.int64)
        self.has_nulls, self._has_plain = bool(self._lowest.any()), bool(self._plain.any())
        self._wrong = wrong

    def __call__(self, which: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
        if not self._has_plain:
            return self._found(which, which, rows)
        coded = np.flatnonzero(~self._plain[which])
        chunks, places = which.copy(), rows.copy()
        chunks[coded], places[coded] = self._found(which[coded], self._number[which[coded]], rows[coded], coded)
        return chunks, places

    def _found(
        self, which: Int64s, numbers: Int64s, rows: Int64s, asked: Int64s | None = None
    ) -> tuple[Int64s, Int64s]:
        """Where the values of rows lie, all of which are coded; `asked` are the places of these among all rows."""
        found = self._codes.at(numbers, rows).astype(np.int64)
        outside = found >= self._lengths[numbers]
        outside |= found < (self._lowest[numbers] if self.has_nulls else 0)
        if outside.any():
            at = int(outside.argmax())
            raise self._wrong(
                at if asked is None else int(asked[at]),
                f"is value {found[at]} of a dictionary of {self._lengths[numbers[at]]}: the file is damaged; write it"
                " again, or leave it out",
            )
        if not self.has_nulls:
            return which, found
        return np.where(found < 0, len(self._plain), which), np.maximum(found, 0)


def _span(codes: Sequence[ItemSpan]) -> ScatteredItems:
    """In some chunks codes may be wider than in others."""
    dtypes = {each.array.dtype for each in codes}
    if len(dtypes) == 1:
        return ScatteredItems(codes, dtypes.pop())
    return ScatteredItems([items(each.array.astype(np.int64)) for each in codes], np.dtype(np.int64))


class CellError(SampleError):
    """A value that cannot be given, in row `at` of those that were asked for; who asked knows which row that is."""

    def __init__(self, column: str, at: int, problem: str) -> None:
        super().__init__(column, at, problem)
        self.column, self.at, self.problem = column, at, problem


class NumberColumn:
    """Tensors of one shape."""

    def __init__(self, name: str, kind: NumberType, chunks: Sequence[NumberChunk], nulls: Nulls) -> None:
        self.name, self.kind = name, kind
        self.width = prod(kind.shape)
        self.span = ScatteredItems([chunk.items for chunk in chunks], kind.dtype)
        self.missing = _missing([chunk.missing for chunk in chunks], [len(chunk.items.array) for chunk in chunks])
        self._nulls, self._fill = nulls, None if self.missing is None else nulls.fill(kind)

    def batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> torch.Tensor:
        """These rows as one tensor, in memory from `empty`."""
        return self._rows(which, rows, self.kind.shape, empty)

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        """Each row as a tensor; they share memory with each other only."""
        return list(self.batch(which, rows, allocate_tensor).unbind())

    def windows(self, which: Int64s, rows: Int64s, length: int, empty: Allocator) -> torch.Tensor:
        """`length` rows from each of these on."""
        return self._rows(which, rows, (length, *self.kind.shape), empty)

    def runs(self, which: Int64s, starts: Int64s, stops: Int64s) -> list[torch.Tensor]:
        """The rows `[start, stop)` of each, one tensor each."""
        if self.missing is not None:  # look at every item
            lengths, places = _expanded(starts, stops)
            return list(torch.split(self.batch(which.repeat(lengths), places, allocate_tensor), lengths.tolist()))
        width = self.width
        flat, sizes = self.span.runs(which, starts * width, stops * width)
        parts = torch.split(flat, sizes)
        return [part.view(-1, *self.kind.shape) for part in parts] if self.kind.shape else list(parts)

    def _rows(self, which: Int64s, rows: Int64s, shape: tuple[int, ...], empty: Allocator) -> torch.Tensor:
        places = rows * self.width
        if self.missing is None:
            return self.span.windows(which, places, shape, empty)
        mask = self.missing.windows(which, places, shape, allocate_tensor).numpy()
        has_nulls = mask.any()
        if has_nulls and self._fill is None:
            at = int(mask.reshape(len(mask), -1).any(axis=1).argmax())
            raise CellError(self.name, at, self._nulls.problem(self.name, self.kind))
        out = self.span.windows(which, places, shape, empty)
        if has_nulls:
            numpy_view(out)[mask] = self._fill
        return out


class RaggedColumn:
    """Rows of different lengths: where each begins and ends in its chunk of the child."""

    def __init__(self, name: str, kind: TextType | ListType, chunks: Sequence[RaggedChunk], nulls: Nulls) -> None:
        self.name, self.kind = name, kind
        self._offsets = _of_one_dtype([chunk.offsets for chunk in chunks])
        rows = [len(chunk.offsets.array) - 1 for chunk in chunks]
        item = kind.item if isinstance(kind, ListType) else None
        self._child_rows = np.array([row_count(item, chunk.child) for chunk in chunks], np.int64)
        self._missing = _missing([chunk.missing for chunk in chunks], rows)
        self._nulls, self._fill = nulls, None if self._missing is None else nulls.fill(kind)

    def bounds(self, which: Int64s, rows: Int64s) -> tuple[Int64s, Int64s, NDArray[np.bool_] | None]:
        """Where rows begin and end, and which of them are missing, to be filled: these are empty."""
        starts, stops = self._offsets.at(which, rows), self._offsets.at(which, rows + 1)
        missing = None if self._missing is None else self._missing.at(which, rows)
        if missing is not None and missing.any():
            if self._fill is None:
                raise CellError(self.name, int(missing.argmax()), self._nulls.problem(self.name, self.kind))
            stops = np.where(missing, starts, stops)
        # what is mapped was not validated, and an offset beyond the child would be read from foreign memory
        outside = (starts < 0) | (stops < starts) | (stops > self._child_rows[which])
        if outside.any():
            problem = "lies outside of its column: the file is damaged; write it again, or leave it out"
            raise CellError(self.name, int(outside.argmax()), problem)
        return starts.astype(np.int64, copy=False), stops.astype(np.int64, copy=False), missing


class TextColumn(RaggedColumn):
    """Texts, or bytes."""

    def __init__(self, name: str, kind: TextType, chunks: Sequence[RaggedChunk], nulls: Nulls) -> None:
        super().__init__(name, kind, chunks, nulls)
        self._binary = kind.binary
        self._span = ScatteredItems(
            [chunk.child.items for chunk in chunks if isinstance(chunk.child, NumberChunk)], _BYTES
        )

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        """Each row as a `str`, or as `bytes`."""
        starts, stops, missing = self.bounds(which, rows)
        base, view = self._span.starts[which], self._span.view.data
        raw = [view[a:b] for a, b in zip((base + starts).tolist(), (base + stops).tolist(), strict=True)]
        found: list[Any] = [part.tobytes() for part in raw] if self._binary else self._decoded(raw)
        if missing is not None:
            for row in np.flatnonzero(missing).tolist():
                found[row] = self._fill
        return found

    def _decoded(self, raw: Sequence[memoryview]) -> list[str]:
        texts: list[str] = []
        try:
            texts.extend(str(part, "utf-8") for part in raw)
        except UnicodeDecodeError as error:
            raise CellError(self.name, len(texts), f"is not UTF-8 ({error}); store it as binary") from error
        return texts

    def batch(self, which: Int64s, rows: Int64s, _: Allocator) -> list[Any]:
        """These rows in a list, as default collate leaves them."""
        return self.samples(which, rows)


class ListColumn(RaggedColumn):
    """Lists: a tensor for each row where the items are numbers."""

    def __init__(self, name: str, kind: ListType, chunks: Sequence[RaggedChunk], nulls: Nulls) -> None:
        super().__init__(name, kind, chunks, nulls)
        self._child = column_of(name, kind.item, [chunk.child for chunk in chunks], nulls)

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        """Each row as a tensor of its items, or as a list of them if they are not numbers or not of one shape."""
        starts, stops, _ = self.bounds(which, rows)
        try:
            if isinstance(self._child, NumberColumn):
                return self._child.runs(which, starts, stops)
            lengths, places = _expanded(starts, stops)
            found = self._child.samples(which.repeat(lengths), places)
        except CellError as error:
            raise _of_row(error, starts, stops) from None
        cuts = pairwise([0, *accumulate(lengths.tolist())])
        return [_stacked(found[a:b]) for a, b in cuts]

    def batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> Any:
        """What default collate makes of the samples; lists of numbers that are equally long become one tensor."""
        starts, stops, _ = self.bounds(which, rows)
        length = int(stops[0] - starts[0]) if len(rows) else 0
        if isinstance(self._child, NumberColumn) and ((stops - starts) == length).all():
            return self._child.windows(which, starts, length, empty)
        return collate.default(self.samples(which, rows), empty=empty)


class StructColumn:
    """Dicts."""

    def __init__(self, name: str, kind: StructType, chunks: Sequence[StructChunk], nulls: Nulls) -> None:
        prefix = f"{name}." if name else ""
        self.fields: dict[str, Column] = {
            each: column_of(
                prefix + each, kind_of_field, [chunk.fields[i] for chunk in chunks], nulls.within(prefix + each)
            )
            for i, (each, kind_of_field) in enumerate(kind.fields)
            if each not in kind.left_out
        }

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        """Each row as a dict."""
        if not self.fields:
            return [{} for _ in rows]
        names, columns = tuple(self.fields), [field.samples(which, rows) for field in self.fields.values()]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> dict[str, Any]:
        """The batch of each field, by name."""
        return {name: field.batch(which, rows, empty) for name, field in self.fields.items()}


class RedirectedColumn:
    """Rows of another column."""

    def __init__(self, column: Column, redirection: Redirection) -> None:
        self._column, self._redirection = column, redirection

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        """The other column's samples."""
        return self._column.samples(*self._redirection(which, rows))

    def batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> Any:
        """The other column's batch."""
        return self._column.batch(*self._redirection(which, rows), empty)


Column = NumberColumn | TextColumn | ListColumn | StructColumn | RedirectedColumn


_BYTES = np.dtype(np.uint8)


def column_of(name: str, kind: ColumnType, chunks: Sequence[Any], nulls: Nulls) -> Column:
    """The column that these chunks of one kind make together; "" names the table itself."""
    found = redirected(kind, chunks, partial(CellError, name))
    if found is not None:
        return RedirectedColumn(column_of(name, kind, found.chunks, nulls), found.redirection)
    match kind:
        case NumberType():
            return NumberColumn(name, kind, chunks, nulls)
        case TextType():
            return TextColumn(name, kind, chunks, nulls)
        case ListType():
            return ListColumn(name, kind, chunks, nulls)
        case StructType():
            return StructColumn(name, kind, chunks, nulls)


def _of_one_dtype(chunks: Sequence[ItemSpan]) -> ScatteredItems:
    """The offsets of all chunks: in some files they may be wider than in others."""
    dtypes = {chunk.array.dtype for chunk in chunks}
    if len(dtypes) == 1:
        return ScatteredItems(chunks, dtypes.pop())
    return ScatteredItems([items(chunk.array.astype(np.int64)) for chunk in chunks], np.dtype(np.int64))


def _missing(masks: Sequence[ItemSpan | None], lengths: Sequence[int]) -> ScatteredItems | None:
    if all(mask is None for mask in masks):
        return None
    filled = [
        items(np.zeros(length, np.bool_)) if mask is None else mask for mask, length in zip(masks, lengths, strict=True)
    ]
    return ScatteredItems(filled, np.dtype(np.bool_))


def _of_row(error: CellError, starts: Int64s, stops: Int64s) -> CellError:
    """The error of an item, as one of the row that the item belongs to."""
    row = int(np.searchsorted(np.cumsum(stops - starts), error.at, side="right"))
    return CellError(error.column, row, error.problem)


def _expanded(starts: Int64s, stops: Int64s) -> tuple[Int64s, Int64s]:
    """The length of each row, and the place of every item of every row."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    return lengths, np.arange(int(lengths.sum()), dtype=np.int64) + (starts - before).repeat(lengths)


def _stacked(parts: list[Any]) -> Any:
    """Tensors of one shape as one tensor; anything else as it is."""
    if not parts or not isinstance(parts[0], torch.Tensor):
        return parts
    shape = parts[0].shape
    return (
        torch.stack(parts) if all(isinstance(part, torch.Tensor) and part.shape == shape for part in parts) else parts
    )
