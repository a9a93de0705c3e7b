"""Table columns over many chunks, read as tensors, texts, lists and dicts.

`column_of` builds a tree of columns from the chunks of one type. All read rows as a pair of arrays: `which`, the chunk
of each row, and `rows`, its number there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import collate
from feedline.core.kernels import Int64s, gather_rows
from feedline.core.tensors import Allocator, allocate_tensor, numpy_view
from feedline.datasets.tables.chunks import ItemSpan, NumberChunk, RaggedChunk, StructChunk, items, row_count
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.scattered import Redirection, ScatteredItems, redirect, scattered
from feedline.datasets.tables.types import ColumnType, ListType, NumberType, StructType, TextType
from feedline.errors import SampleError


class CellError(SampleError):
    """An unreadable value of a column.

    `at` is the position among the requested rows. The caller, who knows the file and row, turns it into a SampleError.
    """

    def __init__(self, column: str, at: int, problem: str) -> None:
        super().__init__(column, at, problem)
        self.column, self.at, self.problem = column, at, problem


class NullError(CellError):
    """A null without a fill value."""


class NumberColumn:
    """Tensors of one shape."""

    def __init__(self, name: str, kind: NumberType, chunks: Sequence[NumberChunk], nulls: Nulls) -> None:
        self.name, self.kind = name, kind
        self.width = prod(kind.shape)
        self.span = ScatteredItems([chunk.items for chunk in chunks], kind.dtype)
        self.missing = _missing([chunk.missing for chunk in chunks], [len(chunk.items.array) for chunk in chunks])
        self._nulls, self._fill = nulls, None if self.missing is None else nulls.fill(kind)

    def batch(self, which: Int64s, rows: Int64s, allocate: Allocator) -> torch.Tensor:
        """The rows as one tensor, in memory from `allocate`."""
        return self._rows(which, rows, self.kind.shape, allocate)

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        """Each row as a tensor. All are views of one new tensor."""
        return list(self.batch(which, rows, allocate_tensor).unbind())

    def windows(self, which: Int64s, rows: Int64s, length: int, allocate: Allocator) -> torch.Tensor:
        """`length` consecutive rows from each of `rows` on, as one tensor."""
        return self._rows(which, rows, (length, *self.kind.shape), allocate)

    def runs(self, which: Int64s, starts: Int64s, stops: Int64s) -> list[torch.Tensor]:
        """One tensor for each range of rows `[start, stop)`."""
        if self.missing is not None:  # every item must be checked for null
            lengths, places = _expand_ranges(starts, stops)
            return list(torch.split(self.batch(which.repeat(lengths), places, allocate_tensor), lengths.tolist()))
        width = self.width
        flat, sizes = self.span.runs(which, starts * width, stops * width)
        parts = torch.split(flat, sizes)
        return [part.view(-1, *self.kind.shape) for part in parts] if self.kind.shape else list(parts)

    def _rows(self, which: Int64s, rows: Int64s, shape: tuple[int, ...], allocate: Allocator) -> torch.Tensor:
        places = rows * self.width
        if self.missing is None:
            return self.span.windows(which, places, shape, allocate)
        mask = self.missing.windows(which, places, shape, allocate_tensor).numpy()
        has_nulls = mask.any()
        if has_nulls and self._fill is None:
            at = int(mask.reshape(len(mask), -1).any(axis=1).argmax())
            raise NullError(self.name, at, self._nulls.problem(self.name, self.kind))
        out = self.span.windows(which, places, shape, allocate)
        if has_nulls:
            numpy_view(out)[mask] = self._fill
        return out


class NumberBlock:
    """Columns of plain numbers of one dtype, read in one pass."""

    def __init__(self, columns: Sequence[NumberColumn]) -> None:
        self._items = ScatteredItems.of_all([column.span for column in columns])
        self._starts = np.ascontiguousarray(self._items.starts.reshape(len(columns), -1).T)

    @staticmethod
    def accepts(column: object) -> bool:
        """True for a column of one number to a row, without nulls."""
        return isinstance(column, NumberColumn) and not column.kind.shape and column.missing is None

    def batch(self, which: Int64s, rows: Int64s, dtype: np.dtype[Any]) -> list[torch.Tensor]:
        """Rows of each column as a tensor of `dtype`.

        `dtype` represents all values of the columns' own dtypes.
        """
        places = self._starts.take(which, axis=0)
        places += rows[:, None]
        found = gather_rows(self._items.view, places.reshape(-1)).reshape(places.shape)
        return list(map(torch.from_numpy, found.T.astype(dtype, order="C", copy=False)))


class RaggedColumn:
    """Rows of variable length, as ranges of a child chunk."""

    def __init__(self, name: str, kind: TextType | ListType, chunks: Sequence[RaggedChunk], nulls: Nulls) -> None:
        self.name, self.kind = name, kind
        self._offsets = scattered([chunk.offsets for chunk in chunks])
        rows = [len(chunk.offsets.array) - 1 for chunk in chunks]
        item = kind.item if isinstance(kind, ListType) else None
        self._child_rows = np.array([row_count(item, chunk.child) for chunk in chunks], np.int64)
        self._missing = _missing([chunk.missing for chunk in chunks], rows)
        self._nulls, self._fill = nulls, None if self._missing is None else nulls.fill(kind)

    def bounds(self, which: Int64s, rows: Int64s) -> tuple[Int64s, Int64s, NDArray[np.bool_] | None]:
        """Start and stop of each row, and the mask of nulls.

        Nulls are empty ranges. The mask is None if no chunk has nulls. CellError for a null without a fill value, and
        for offsets outside of the child.
        """
        starts, stops = self._offsets.at(which, rows), self._offsets.at(which, rows + 1)
        missing = None if self._missing is None else self._missing.at(which, rows)
        if missing is not None and missing.any():
            if self._fill is None:
                raise NullError(self.name, int(missing.argmax()), self._nulls.problem(self.name, self.kind))
            stops = np.where(missing, starts, stops)  # a null may span items, which are undefined
        # Mapped files are not validated: with an offset beyond the child, foreign memory would be read.
        outside = (starts < 0) | (stops < starts) | (stops > self._child_rows[which])
        if outside.any():
            problem = "is outside of its column: the file is damaged; re-create it or leave it out"
            raise CellError(self.name, int(outside.argmax()), problem)
        return starts.astype(np.int64, copy=False), stops.astype(np.int64, copy=False), missing


class TextColumn(RaggedColumn):
    """Texts as `str`, or `bytes`."""

    def __init__(self, name: str, kind: TextType, chunks: Sequence[RaggedChunk], nulls: Nulls) -> None:
        super().__init__(name, kind, chunks, nulls)
        self._binary = kind.binary
        self._span = ScatteredItems(
            [chunk.child.items for chunk in chunks if isinstance(chunk.child, NumberChunk)], _BYTES
        )

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        """Each row as `str` or `bytes`."""
        starts, stops, missing = self.bounds(which, rows)
        base, view = self._span.starts[which], self._span.view.data
        # Texts are decoded from views of the chunk, because slices of bytes would copy each text twice.
        raw = [view[a:b] for a, b in zip((base + starts).tolist(), (base + stops).tolist(), strict=True)]
        values: list[Any] = [part.tobytes() for part in raw] if self._binary else self._decode(raw)
        if missing is not None:
            for row in np.flatnonzero(missing).tolist():
                values[row] = self._fill
        return values

    def _decode(self, raw: Sequence[memoryview]) -> list[str]:
        texts: list[str] = []
        try:
            texts.extend(str(part, "utf-8") for part in raw)
        except UnicodeDecodeError as error:
            raise CellError(self.name, len(texts), f"is not UTF-8 ({error}); store it as binary") from error
        return texts

    def batch(self, which: Int64s, rows: Int64s, _: Allocator) -> list[Any]:
        """The same list as `samples`, which default collate does not change."""
        return self.samples(which, rows)


class ListColumn(RaggedColumn):
    """Lists, as a tensor for each row if their items are numbers."""

    def __init__(self, name: str, kind: ListType, chunks: Sequence[RaggedChunk], nulls: Nulls) -> None:
        super().__init__(name, kind, chunks, nulls)
        self._child = column_of(name, kind.item, [chunk.child for chunk in chunks], nulls)

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        """Each row as a tensor of its items, or a list.

        It is a list if the items are not numbers, or if their shapes differ.
        """
        starts, stops, _ = self.bounds(which, rows)
        try:
            if isinstance(self._child, NumberColumn):
                return self._child.runs(which, starts, stops)
            lengths, places = _expand_ranges(starts, stops)
            values = self._child.samples(which.repeat(lengths), places)
        except CellError as error:
            raise _item_to_row(error, starts, stops) from None
        cuts = pairwise([0, *accumulate(lengths.tolist())])
        return [_stack(values[a:b]) for a, b in cuts]

    def batch(self, which: Int64s, rows: Int64s, allocate: Allocator) -> Any:
        """Default-collated samples: one tensor for equally long lists of numbers."""
        starts, stops, _ = self.bounds(which, rows)
        # Lists of equal length are windows of the child, which one gather copies directly into the batch.
        length = int(stops[0] - starts[0]) if len(rows) else 0
        if isinstance(self._child, NumberColumn) and ((stops - starts) == length).all():
            return self._child.windows(which, starts, length, allocate)
        return collate.default(self.samples(which, rows), allocate=allocate)


class StructColumn:
    """Dicts by field. Fields that are `left_out` are not read."""

    def __init__(self, name: str, kind: StructType, chunks: Sequence[StructChunk], nulls: Nulls) -> None:
        prefix = f"{name}." if name else ""
        self.fields: dict[str, TableColumn] = {
            each: column_of(
                prefix + each, kind_of_field, [chunk.fields[i] for chunk in chunks], nulls.within(prefix + each)
            )
            for i, (each, kind_of_field) in enumerate(kind.fields)
            if each not in kind.left_out
        }

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        if not self.fields:
            return [{} for _ in rows]
        names, columns = tuple(self.fields), [field.samples(which, rows) for field in self.fields.values()]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def batch(
        self, which: Int64s, rows: Int64s, allocate: Allocator, names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """The batch of each field, or of those in `names`."""
        fields = self.fields
        return {name: fields[name].batch(which, rows, allocate) for name in (fields if names is None else names)}


class RedirectedColumn:
    """A column whose values are in the chunks of another one."""

    def __init__(self, column: TableColumn, redirection: Redirection) -> None:
        self._column, self._redirection = column, redirection

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        return self._column.samples(*self._redirection(which, rows))

    def batch(self, which: Int64s, rows: Int64s, allocate: Allocator) -> Any:
        return self._column.batch(*self._redirection(which, rows), allocate)


TableColumn = NumberColumn | TextColumn | ListColumn | StructColumn | RedirectedColumn


def number_blocks(
    fields: Mapping[str, TableColumn], targets: Mapping[str, torch.dtype | None]
) -> Iterator[tuple[list[str], NumberBlock, np.dtype[Any]]]:
    """Names and blocks of columns that become the same dtype without loss."""
    names: dict[tuple[np.dtype[Any], np.dtype[Any]], list[str]] = {}
    for name, target in targets.items():
        column = fields[name]
        if target is None or not NumberBlock.accepts(column):
            continue
        assert isinstance(column, NumberColumn)
        own, final = column.kind.dtype, torch.empty(0, dtype=target, device="cpu").numpy().dtype
        if np.can_cast(own, final):  # otherwise torch converts, because NumPy warns about overflows
            names.setdefault((own, final), []).append(name)
    for (_, final), alike in names.items():
        yield alike, NumberBlock([cast("NumberColumn", fields[name]) for name in alike]), final


_BYTES = np.dtype(np.uint8)


def column_of(name: str, kind: ColumnType, chunks: Sequence[Any], nulls: Nulls) -> TableColumn:
    """The column of chunks of one type; "" names the table."""
    resolved = redirect(kind, chunks, partial(CellError, name))
    if resolved is not None:
        return RedirectedColumn(column_of(name, kind, resolved.chunks, nulls), resolved.redirection)
    match kind:
        case NumberType():
            return NumberColumn(name, kind, chunks, nulls)
        case TextType():
            return TextColumn(name, kind, chunks, nulls)
        case ListType():
            return ListColumn(name, kind, chunks, nulls)
        case StructType():
            return StructColumn(name, kind, chunks, nulls)


def _missing(masks: Sequence[ItemSpan | None], lengths: Sequence[int]) -> ScatteredItems | None:
    if all(mask is None for mask in masks):
        return None
    filled = [
        items(np.zeros(length, np.bool_)) if mask is None else mask for mask, length in zip(masks, lengths, strict=True)
    ]
    return ScatteredItems(filled, np.dtype(np.bool_))


def _item_to_row(error: CellError, starts: Int64s, stops: Int64s) -> CellError:
    """The error of an item as an error of its row."""
    row = int(np.searchsorted(np.cumsum(stops - starts), error.at, side="right"))
    return type(error)(error.column, row, error.problem)


def _expand_ranges(starts: Int64s, stops: Int64s) -> tuple[Int64s, Int64s]:
    """The length of each range, and the places of all items."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    return lengths, np.arange(int(lengths.sum()), dtype=np.int64) + (starts - before).repeat(lengths)


def _stack(parts: list[Any]) -> Any:
    """Stack tensors of one shape; return other values unchanged."""
    if not parts or not isinstance(parts[0], torch.Tensor):
        return parts
    shape = parts[0].shape
    return (
        torch.stack(parts) if all(isinstance(part, torch.Tensor) and part.shape == shape for part in parts) else parts
    )
