"""Columns of many chunks: rows of any of them as tensors, texts, lists and dicts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import collate
from feedline.datasets.chunks import Items, NumberChunk, RaggedChunk, StructChunk, items, row_count
from feedline.datasets.kinds import Kind, Lists, Numbers, Struct, Text
from feedline.datasets.nulls import Nulls
from feedline.datasets.redirections import Redirection, redirected
from feedline.datasets.spans import Int64s, Span
from feedline.errors import SampleError
from feedline.rows import Empty, numpy_view, torch_empty


class CellError(SampleError):
    """A value that cannot be given, in row `at` of those that were asked for; who asked knows which row that is."""

    def __init__(self, column: str, at: int, problem: str) -> None:
        super().__init__(column, at, problem)
        self.column, self.at, self.problem = column, at, problem


class NumberColumn:
    """Tensors of one shape."""

    def __init__(self, name: str, kind: Numbers, chunks: Sequence[NumberChunk], nulls: Nulls) -> None:
        self.name, self.kind = name, kind
        self.width = prod(kind.shape)
        self.span = Span([chunk.items for chunk in chunks], kind.dtype)
        self.missing = _missing([chunk.missing for chunk in chunks], [len(chunk.items.array) for chunk in chunks])
        self._nulls, self._fill = nulls, None if self.missing is None else nulls.fill(kind)

    def batch(self, which: Int64s, rows: Int64s, empty: Empty) -> torch.Tensor:
        """These rows as one tensor, in memory from `empty`."""
        return self._rows(which, rows, self.kind.shape, empty)

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        """Each row as a tensor; they share memory with each other only."""
        return list(self.batch(which, rows, torch_empty).unbind())

    def windows(self, which: Int64s, rows: Int64s, length: int, empty: Empty) -> torch.Tensor:
        """`length` rows from each of these on."""
        return self._rows(which, rows, (length, *self.kind.shape), empty)

    def runs(self, which: Int64s, starts: Int64s, stops: Int64s) -> list[torch.Tensor]:
        """The rows `[start, stop)` of each, one tensor each."""
        if self.missing is not None:  # look at every item
            lengths, places = _expanded(starts, stops)
            return list(torch.split(self.batch(which.repeat(lengths), places, torch_empty), lengths.tolist()))
        width = self.width
        flat, sizes = self.span.runs(which, starts * width, stops * width)
        parts = torch.split(flat, sizes)
        return [part.view(-1, *self.kind.shape) for part in parts] if self.kind.shape else list(parts)

    def _rows(self, which: Int64s, rows: Int64s, shape: tuple[int, ...], empty: Empty) -> torch.Tensor:
        places = rows * self.width
        if self.missing is None:
            return self.span.windows(which, places, shape, empty)
        mask = self.missing.windows(which, places, shape, torch_empty).numpy()
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

    def __init__(self, name: str, kind: Text | Lists, chunks: Sequence[RaggedChunk], nulls: Nulls) -> None:
        self.name, self.kind = name, kind
        self._offsets = _of_one_dtype([chunk.offsets for chunk in chunks])
        rows = [len(chunk.offsets.array) - 1 for chunk in chunks]
        item = kind.item if isinstance(kind, Lists) else None
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

    def __init__(self, name: str, kind: Text, chunks: Sequence[RaggedChunk], nulls: Nulls) -> None:
        super().__init__(name, kind, chunks, nulls)
        self._binary = kind.binary
        self._span = Span([chunk.child.items for chunk in chunks if isinstance(chunk.child, NumberChunk)], _BYTES)

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

    def batch(self, which: Int64s, rows: Int64s, _: Empty) -> list[Any]:
        """These rows in a list, as default collate leaves them."""
        return self.samples(which, rows)


class ListColumn(RaggedColumn):
    """Lists: a tensor for each row where the items are numbers."""

    def __init__(self, name: str, kind: Lists, chunks: Sequence[RaggedChunk], nulls: Nulls) -> None:
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

    def batch(self, which: Int64s, rows: Int64s, empty: Empty) -> Any:
        """What default collate makes of the samples; lists of numbers that are equally long become one tensor."""
        starts, stops, _ = self.bounds(which, rows)
        length = int(stops[0] - starts[0]) if len(rows) else 0
        if isinstance(self._child, NumberColumn) and ((stops - starts) == length).all():
            return self._child.windows(which, starts, length, empty)
        return collate.default(self.samples(which, rows), empty=empty)


class StructColumn:
    """Dicts."""

    def __init__(self, name: str, kind: Struct, chunks: Sequence[StructChunk], nulls: Nulls) -> None:
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

    def batch(self, which: Int64s, rows: Int64s, empty: Empty) -> dict[str, Any]:
        """The batch of each field, by name."""
        return {name: field.batch(which, rows, empty) for name, field in self.fields.items()}


class RedirectedColumn:
    """Rows of another column."""

    def __init__(self, column: Column, redirection: Redirection) -> None:
        self._column, self._redirection = column, redirection

    def samples(self, which: Int64s, rows: Int64s) -> list[Any]:
        """The other column's samples."""
        return self._column.samples(*self._redirection(which, rows))

    def batch(self, which: Int64s, rows: Int64s, empty: Empty) -> Any:
        """The other column's batch."""
        return self._column.batch(*self._redirection(which, rows), empty)


Column = NumberColumn | TextColumn | ListColumn | StructColumn | RedirectedColumn
_BYTES = np.dtype(np.uint8)


def column_of(name: str, kind: Kind, chunks: Sequence[Any], nulls: Nulls) -> Column:
    """The column that these chunks of one kind make together; "" names the table itself."""
    found = redirected(kind, chunks, partial(CellError, name))
    if found is not None:
        return RedirectedColumn(column_of(name, kind, found.chunks, nulls), found.redirection)
    match kind:
        case Numbers():
            return NumberColumn(name, kind, chunks, nulls)
        case Text():
            return TextColumn(name, kind, chunks, nulls)
        case Lists():
            return ListColumn(name, kind, chunks, nulls)
        case Struct():
            return StructColumn(name, kind, chunks, nulls)


def _of_one_dtype(chunks: Sequence[Items]) -> Span:
    """The offsets of all chunks: in some files they may be wider than in others."""
    dtypes = {chunk.array.dtype for chunk in chunks}
    if len(dtypes) == 1:
        return Span(chunks, dtypes.pop())
    return Span([items(chunk.array.astype(np.int64)) for chunk in chunks], np.dtype(np.int64))


def _missing(masks: Sequence[Items | None], lengths: Sequence[int]) -> Span | None:
    if all(mask is None for mask in masks):
        return None
    filled = [
        items(np.zeros(length, np.bool_)) if mask is None else mask for mask, length in zip(masks, lengths, strict=True)
    ]
    return Span(filled, np.dtype(np.bool_))


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
