"""Reads of single rows of remote record batches.

A column is read in rounds: validity, numbers and offsets first, then the items that the offsets of texts and lists
refer to. Each round of all columns is one read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.file_objects import merge_ranges
from feedline.datasets.flatbuffers import DamagedError
from feedline.datasets.tables.arrow_batches import ColumnChoice, ObjectBytes
from feedline.datasets.tables.arrow_messages import BatchMetadata, Layout
from feedline.datasets.tables.types import pyarrow
from feedline.stores.base import Range

_WHAT = "datasets.Arrow"


RangeReads = Generator[list[Range], list[memoryview], Any]
"""Yields ranges, receives their bytes, and returns one or several Arrow arrays."""


class ColumnBuffers(NamedTuple):
    """A column of a record batch, with its byte ranges."""

    kind: Any
    length: int
    validity: Range
    """Empty if no row is null."""
    buffers: list[Range]
    children: list[ColumnBuffers]


def columns_of_batch(layout: Layout, place: int, metadata: bytes, choice: ColumnChoice) -> list[ColumnBuffers] | None:
    """The chosen columns; None if they must be read whole.

    Compressed batches must be read whole, and also dictionaries, views, runs and unions, whose rows share buffers.
    DamagedError for a buffer outside of the batch.
    """
    message = BatchMetadata(metadata)
    if not (choice.is_plain and message.is_plain):
        return None
    _, body, stop, _ = layout.batches[place].tolist()
    if len(message.buffers) and not _lie_within(message.buffers, stop - body):
        raise DamagedError("a buffer is outside of it")
    nodes = iter(message.nodes.tolist())
    buffers = ((start + body, start + length + body) for start, length in message.buffers.tolist())
    last = max(choice.fields)
    kinds = [field.type for field in choice.schema][: last + 1]
    columns = [_column(kind, nodes, buffers) if _is_supported(kind) else None for kind in kinds]
    # An unsupported type has an unknown number of buffers, so the buffers of later columns are unknown, too.
    return None if None in columns else [columns[number] for number in choice.fields]  # type: ignore[misc]


def read_rows(
    columns: Sequence[ColumnBuffers], names: Sequence[str], rows: NDArray[np.int64], read: Callable[..., Any]
) -> Any:
    """The `pyarrow.RecordBatch` of these rows, not validated.

    `rows` are sorted and unique; `read(spans)` returns the bytes of ranges of the object.
    """
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    spans = [(int(each[0]), int(each[-1]) + 1) for each in np.split(rows, cuts)]
    reading = _together([_rows(column, spans) for column in columns])
    views: list[memoryview] | None = None
    while True:
        try:
            wanted = next(reading) if views is None else reading.send(views)
        except StopIteration as done:
            return pyarrow(_WHAT).RecordBatch.from_arrays(done.value, names=list(names))
        merged = merge_ranges([each for each in wanted if each[0] < each[1]])
        data = ObjectBytes(merged, read(merged) if merged else [])
        views = [data.cut(*each) if each[0] < each[1] else memoryview(b"") for each in wanted]


def _lie_within(buffers: NDArray[np.int64], nbytes: int) -> bool:
    ends = buffers.sum(axis=1)
    return bool(buffers.min() >= 0 and ends.min() >= 0 and ends.max() <= nbytes)


def _is_supported(kind: Any) -> bool:
    types = pyarrow(_WHAT).types
    if isinstance(kind, pyarrow(_WHAT).BaseExtensionType):
        return _is_supported(kind.storage_type)
    if types.is_struct(kind):
        return all(_is_supported(field.type) for field in kind)
    if _is_list(kind) or types.is_fixed_size_list(kind):
        return _is_supported(kind.value_type)
    return _is_ragged(kind) or (types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind))


def _is_list(kind: Any) -> bool:
    types = pyarrow(_WHAT).types
    return bool(types.is_list(kind) or types.is_large_list(kind))


def _is_ragged(kind: Any) -> bool:
    types = pyarrow(_WHAT).types
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def _column(kind: Any, nodes: Iterator[list[int]], buffers: Iterator[Range]) -> ColumnBuffers:
    """Take the nodes and buffers of a column, in Arrow's depth-first order."""
    if isinstance(kind, pyarrow(_WHAT).BaseExtensionType):
        return _column(kind.storage_type, nodes, buffers)._replace(kind=kind)
    types = pyarrow(_WHAT).types
    (length, nulls), (start, stop) = _next(nodes), _next(buffers)
    validity = (start, stop) if nulls else (start, start)
    if types.is_struct(kind):
        return ColumnBuffers(kind, length, validity, [], [_column(field.type, nodes, buffers) for field in kind])
    if types.is_fixed_size_list(kind):
        return ColumnBuffers(kind, length, validity, [], [_column(kind.value_type, nodes, buffers)])
    own = [_next(buffers) for _ in range(2 if _is_ragged(kind) else 1)]
    items = [_column(kind.value_type, nodes, buffers)] if _is_list(kind) else []
    return ColumnBuffers(kind, length, validity, own, items)


def _next(each: Iterator[Any]) -> Any:
    found = next(each, None)
    if found is None:
        raise DamagedError("its metadata list fewer buffers than its columns have")
    return found


def _together(parts: Sequence[RangeReads]) -> RangeReads:
    """Run readings together: each round of all of them is one read."""
    results: list[Any] = [None] * len(parts)
    answers: dict[int, list[memoryview] | None] = dict.fromkeys(range(len(parts)))
    while answers:
        wanted: dict[int, list[Range]] = {}
        for number, views in answers.items():
            try:
                wanted[number] = next(parts[number]) if views is None else parts[number].send(views)
            except StopIteration as done:
                results[number] = done.value
        if not wanted:
            break
        received = iter((yield [each for several in wanted.values() for each in several]))
        answers = {number: list(islice(received, len(several))) for number, several in wanted.items()}
    return results


def _rows(column: ColumnBuffers, spans: list[Range]) -> RangeReads:
    """Read these ranges of rows of a column as one array."""
    arrow, kind = pyarrow(_WHAT), column.kind
    if isinstance(kind, arrow.BaseExtensionType):
        storage = yield from _rows(column._replace(kind=kind.storage_type), spans)
        return arrow.ExtensionArray.from_storage(kind, storage)
    if not spans:
        return arrow.array([], kind)
    if any(start < 0 or stop > column.length for start, stop in spans):
        raise DamagedError("offsets point out of its columns")
    if arrow.types.is_struct(kind):
        parts = [_rows(each, spans) for each in column.children]
    elif arrow.types.is_fixed_size_list(kind):
        parts = [_rows(column.children[0], [(a * kind.list_size, b * kind.list_size) for a, b in spans])]
    else:
        parts = [_content(column, spans) if len(column.buffers) > 1 or column.children else _numbers(column, spans)]
    validity, *read = yield from _together([_validity(column, spans), *parts])
    count = sum(stop - start for start, stop in spans)
    if not column.buffers:
        return arrow.Array.from_buffers(kind, count, [validity], children=read)
    buffers, children = read[0]
    return arrow.Array.from_buffers(kind, count, [validity, *map(arrow.py_buffer, buffers)], children=children)


def _validity(column: ColumnBuffers, spans: list[Range]) -> RangeReads:
    if column.validity[0] == column.validity[1]:
        return None
    return pyarrow(_WHAT).py_buffer((yield from _bits(column.validity, spans)))


def _numbers(column: ColumnBuffers, spans: list[Range]) -> RangeReads:
    """The items of rows of a fixed size, as one buffer."""
    width, buffer = column.kind.bit_width, column.buffers[0]
    if width == 1:
        return [(yield from _bits(buffer, spans))], []
    views = yield [_part(buffer, start * width // 8, stop * width // 8) for start, stop in spans]
    return [b"".join(views)], []


def _bits(buffer: Range, spans: list[Range]) -> RangeReads:
    views = yield [_part(buffer, start // 8, -(-stop // 8)) for start, stop in spans]
    bits = [
        np.unpackbits(np.frombuffer(view, np.uint8), bitorder="little")[start % 8 :][: stop - start]
        for view, (start, stop) in zip(views, spans, strict=True)
    ]
    return np.packbits(np.concatenate(bits), bitorder="little").tobytes()


def _content(column: ColumnBuffers, spans: list[Range]) -> RangeReads:
    """The offsets of texts or lists, and their items."""
    dtype = np.dtype(np.int64 if str(column.kind).startswith("large_") else np.int32)
    size = dtype.itemsize
    views = yield [_part(column.buffers[0], start * size, (stop + 1) * size) for start, stop in spans]
    offsets = [np.frombuffer(view, dtype) for view in views]
    if any(int(each[0]) < 0 or (np.diff(each) < 0).any() for each in offsets):
        raise DamagedError("offsets of a column do not increase")
    inner = [(int(each[0]), int(each[-1])) for each in offsets if each[0] < each[-1]]
    lengths = np.concatenate([np.diff(each) for each in offsets])
    moved = np.concatenate(([0], np.cumsum(lengths))).astype(dtype).tobytes()
    if column.children:
        # Ranges of a damaged file may overlap, and are then read once for each row.
        return [moved], [(yield from _rows(column.children[0], inner))]
    texts = yield [_part(column.buffers[1], start, stop) for start, stop in inner]
    return [moved, b"".join(texts)], []


def _part(buffer: Range, start: int, stop: int) -> Range:
    """The place of a buffer's range in the object."""
    if buffer[0] + stop > buffer[1]:
        raise DamagedError("a buffer is shorter than its column")
    return buffer[0] + start, buffer[0] + stop
