"""Plans and reads of single record batches of Arrow objects."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import LRUCache
from feedline.datasets.file_objects import RangeFile, merge_ranges
from feedline.datasets.flatbuffers import INT16, DamagedError, FlatTable
from feedline.datasets.tables.arrow_messages import (
    BATCH,
    BLOCK,
    DICTIONARY,
    MAGIC,
    V5,
    BatchMetadata,
    Layout,
    count_nodes,
    dictionary_ids,
)
from feedline.datasets.tables.types import pyarrow
from feedline.stores.base import Range
from feedline.stores.requests import FetchedRanges

_WHAT = "datasets.Arrow"


_SLOT_NBYTES = 16


_PATTERNS = 256


_JOINED_NBYTES = 1 << 20
"""Below this size, a copy of the buffers into one costs less than the calls of pyarrow into a Python file (about 0.3
ms).
"""


@dataclass(frozen=True)
class ColumnChoice:
    """The chosen columns in one schema."""

    schema: Any
    fields: list[int]
    """Numbers of the chosen columns, in the order of the schema."""
    are_all: bool
    dictionaries: frozenset[int]
    """Ids of the dictionaries that the chosen columns use."""
    is_plain: bool
    """True for a little-endian schema without dictionaries, whose batches can be read without a file around them."""
    nodes: NDArray[np.bool_]
    """True for the field nodes of a record batch that belong to the chosen columns."""
    buffers: LRUCache[tuple[bytes, ...], NDArray[np.intp]]
    """Numbers of the buffers that pyarrow reads for the chosen columns, by `BatchMetadata.pattern`."""


def choose(layout: Layout, names: set[str]) -> ColumnChoice:
    """Find the columns with these names in the schema of an object."""
    table = FlatTable(memoryview(layout.head), layout.schema_at)
    fields, schema = table.tables(1), read_schema(layout)
    chosen = [number for number, name in enumerate(schema.names) if name in names]
    ids = [frozenset(dictionary_ids(field)) for field in fields]
    return ColumnChoice(
        schema,
        chosen,
        len(chosen) == len(fields),
        frozenset().union(*(ids[number] for number in chosen)),
        table.scalar(0, INT16) == 0 and not any(ids),
        np.repeat(np.isin(np.arange(len(fields)), chosen), [count_nodes(field) for field in fields]),
        LRUCache(_PATTERNS),
    )


class ReadPlan(NamedTuple):
    """Byte ranges of one record batch, and matching metadata."""

    metadata: bytes | None
    """Metadata with the chosen buffers close together; None if the whole message is read, as the only buffer."""
    dictionaries: list[tuple[int, int, int]]
    buffers: list[Range]
    offsets: list[int]
    """Offset of each buffer in the new body; for a whole message, the offset of its body."""
    body_nbytes: int
    """Size of the new body; 0 for a whole message."""
    spans: list[Range]
    """Ranges of the object to read, ordered and merged."""


def plan_whole(layout: Layout, place: int, dictionaries: list[tuple[int, int, int]]) -> ReadPlan:
    """Plan to read all columns of a record batch."""
    start, body, stop, _ = layout.batches[place].tolist()
    return ReadPlan(None, dictionaries, [(start, stop)], [body - start], 0, _spans(dictionaries, [(start, stop)]))


def plan_columns(
    layout: Layout, place: int, metadata: bytes, choice: ColumnChoice, dictionaries: list[tuple[int, int, int]]
) -> ReadPlan:
    """Plan to read only the buffers of the chosen columns.

    DamagedError if a buffer is outside of the record batch.
    """
    _, body, stop, _ = layout.batches[place].tolist()
    message = BatchMetadata(metadata)
    pattern = message.pattern(choice.nodes)
    numbers = choice.buffers.get(pattern)
    if numbers is None:
        numbers = choice.buffers.put(pattern, _buffers_read(layout, message, choice.fields))
    numbers = numbers[message.buffers[numbers, 1] != 0]
    starts, lengths = message.buffers[numbers].T
    ends = starts + lengths
    if len(numbers) and (starts.min() < 0 or lengths.min() < 0 or ends.min() < 0 or ends.max() > stop - body):
        raise DamagedError("a buffer is outside of it")
    # pyarrow merges adjacent reads, with a copy, so buffers without padding get a gap
    steps = lengths // 8 * 8 + 8
    offsets = np.cumsum(steps) - steps
    moved = np.zeros_like(message.buffers)
    moved[numbers, 0], moved[numbers, 1] = offsets, lengths
    nbytes = int(steps.sum())
    buffers = list(zip((starts + body).tolist(), (ends + body).tolist(), strict=True))
    shown = message.with_buffers(moved, nbytes)
    return ReadPlan(shown, dictionaries, buffers, offsets.tolist(), nbytes, _spans(dictionaries, buffers))


def _spans(dictionaries: list[tuple[int, int, int]], buffers: list[Range]) -> list[Range]:
    return merge_ranges([*((start, stop) for start, _, stop in dictionaries), *buffers])


def _buffers_read(layout: Layout, message: BatchMetadata, fields: list[int]) -> NDArray[np.intp]:
    """Find the buffers that pyarrow reads, by a trial.

    Each buffer gets its own slot in an empty body, and the slots that pyarrow reads are recorded.
    """
    count = len(message.buffers)
    slots = np.arange(count) * _SLOT_NBYTES
    shown = message.with_buffers(np.stack([slots, np.full(count, 8)], axis=1), count * _SLOT_NBYTES)
    file = _VirtualFile(layout)
    begin = file.add(BATCH, memoryview(shown), [], count * _SLOT_NBYTES)
    reader = file.reader(fields, in_memory=False)
    file.asked.clear()
    # Dictionaries are missing and compressed data are zeros. pyarrow detects this only after the reads.
    with suppress(pyarrow(_WHAT).ArrowException, OSError):
        reader.get_batch(0)
    asked = np.zeros(count, np.bool_)
    for low, high in file.asked:
        asked |= (slots + begin < high) & (slots + begin + 8 > low)
    return np.flatnonzero(asked)


class ObjectBytes(FetchedRanges):
    """Bytes of an object that was read completely."""

    def cut(self, start: int, stop: int) -> memoryview:
        view = super().find(start, stop)
        if view is None:
            raise DamagedError(f"the bytes from {start} to {stop} are missing")
        return view


def read_batch(layout: Layout, choice: ColumnChoice, plan: ReadPlan, data: ObjectBytes) -> Any:
    """Build the `pyarrow.RecordBatch` of the chosen columns, not validated.

    `data` holds the bytes of `plan.spans`.
    """
    if plan.metadata is None:
        (start, stop), body = plan.buffers[0], plan.buffers[0][0] + plan.offsets[0]
        metadata, pieces, nbytes = data.cut(start, body), [(0, data.cut(body, stop))], stop - body
    else:
        metadata, nbytes = memoryview(plan.metadata), plan.body_nbytes
        pieces = [(at, data.cut(*span)) for at, span in zip(plan.offsets, plan.buffers, strict=True)]
    is_plain = choice.is_plain and BatchMetadata(metadata).is_plain
    if is_plain and plan.metadata is None:
        return _read_message(data.cut(start, stop), choice)
    if is_plain and nbytes <= _JOINED_NBYTES:
        placed = [(0, metadata), *((len(metadata) + at, view) for at, view in pieces)]
        return _read_message(_join(placed, 0, len(metadata) + nbytes), choice)
    file = _VirtualFile(layout)
    for first, body, stop in plan.dictionaries:
        file.add(DICTIONARY, data.cut(first, body), [(0, data.cut(body, stop))], stop - body)
    file.add(BATCH, metadata, pieces, nbytes)
    in_memory = file.nbytes <= _JOINED_NBYTES
    return file.reader(None if choice.are_all else choice.fields, in_memory=in_memory).get_batch(0)


def _read_message(message: memoryview, choice: ColumnChoice) -> Any:
    """Read a plain record batch from one piece of memory."""
    arrow = pyarrow(_WHAT)
    batch = arrow.ipc.read_record_batch(arrow.py_buffer(message), choice.schema)
    if choice.are_all:
        return batch
    names = [choice.schema.names[number] for number in choice.fields]
    return arrow.RecordBatch.from_arrays([batch.column(number) for number in choice.fields], names=names)


def _join(pieces: Sequence[tuple[int, memoryview]], start: int, stop: int) -> memoryview:
    """Copy a range of pieces by offset, with zeros between them."""
    data = bytearray(stop - start)
    for at, view in pieces:
        lower, upper = max(at, start), min(at + len(view), stop)
        if lower < upper:
            data[lower - start : upper - start] = view[lower - at : upper - at]
    return memoryview(data)


class _VirtualFile(RangeFile):
    """An Arrow file of a few messages of an object.

    It has its own footer, so files and streams are read in the same way, and so are dictionaries that change within a
    stream. `asked` are the ranges that pyarrow read; bytes outside of all messages are zeros.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(0)
        self.asked: list[Range] = []
        self._layout = layout
        self._pieces: list[tuple[int, memoryview]] = []
        self._read = FetchedRanges()
        self._blocks: dict[int, list[bytes]] = {DICTIONARY: [], BATCH: []}
        self._put(0, memoryview(MAGIC))
        self._nbytes = 8

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def add(self, kind: int, metadata: memoryview, pieces: Sequence[tuple[int, memoryview]], body_nbytes: int) -> int:
        """Append a message; returns the offset of its body in this file."""
        start, body = self._nbytes, self._nbytes + len(metadata)
        self._blocks[kind].append(BLOCK.pack(start, len(metadata), body_nbytes))
        for at, view in [(start, metadata), *((body + at, view) for at, view in pieces)]:
            self._put(at, view)
        self._nbytes = -(-(body + body_nbytes) // 8) * 8  # pyarrow refuses blocks that are not aligned
        return body

    def reader(self, fields: list[int] | None, *, in_memory: bool) -> Any:
        """Open a reader of these fields, or of all.

        No message can be added after that. With `in_memory`, the reader reads a copy of the whole file. Otherwise it
        reads views of the pieces, and `asked` records the reads.
        """
        arrow = pyarrow(_WHAT)
        footer = _build_footer(self._layout, self._blocks[DICTIONARY], self._blocks[BATCH])
        tail = footer + len(footer).to_bytes(4, "little") + MAGIC
        self._put(self._nbytes, memoryview(tail))
        self._nbytes += len(tail)
        # Several threads of the loader already read batches.
        options = arrow.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
        if in_memory:
            return arrow.ipc.open_file(arrow.py_buffer(_join(self._pieces, 0, self._nbytes)), options=options)
        spans = [(at, at + len(view)) for at, view in self._pieces]
        self._read = FetchedRanges(spans, [view for _, view in self._pieces])
        return arrow.ipc.open_file(arrow.PythonFile(self, "r"), options=options)

    def _put(self, at: int, view: memoryview) -> None:
        if len(view):
            self._pieces.append((at, view))

    def _bytes(self, start: int, stop: int) -> memoryview:
        self.asked.append((start, stop))
        view = self._read.find(start, stop)
        return _join(self._pieces, start, stop) if view is None else view


def read_schema(layout: Layout) -> Any:
    """Read the `pyarrow.Schema` of an object."""
    return _VirtualFile(layout).reader(None, in_memory=True).schema


def _build_footer(layout: Layout, dictionaries: Sequence[bytes], batches: Sequence[bytes]) -> bytes:
    """Build the FlatBuffer of a footer."""
    # FlatBuffers use relative offsets, so the whole `head` can be at the end and serve as the schema.
    first = 36  # elements of 8-byte numbers must be at multiples of 8, with the count before them
    second = first + 4 + 24 * len(dictionaries) + 4
    head = second + 4 + 24 * len(batches)
    parts = [
        struct.pack("<I6H", 16, 12, 20, 4, 8, 12, 16),  # the table's offset; sizes, and offsets of its fields
        struct.pack("<ihxxIII", 12, V5, head + layout.schema_at - 24, first - 28, second - 32),
        struct.pack("<I", len(dictionaries)),
        *dictionaries,
        struct.pack("<4xI", len(batches)),
        *batches,
        layout.head,
    ]
    return b"".join(parts)


def validate_batch(batch: Any, *, in_place: bool = False) -> Any:
    """Check that no offset points out of a record batch's buffers.

    This includes views, indices and runs. Returns the batch; pyarrow's ArrowInvalid describes a fault. With `in_place`,
    only views and runs are checked completely, because their use reads all of them. Offsets of other columns are
    checked row by row when they are used. Text that is not UTF-8 is accepted here: the error names its row when it is
    read.
    """
    arrow = pyarrow(_WHAT)
    if in_place:
        batch.validate()
        for column in batch.columns:
            if any(layout in str(column.type) for layout in ("view", "run_end_encoded")):
                _check_what_is_read(arrow, column)
        return batch
    try:
        batch.validate(full=True)
    except arrow.ArrowInvalid as error:
        # One row of bad text must not make other rows unreadable, and must not hide damage in another column. What
        # lies below a null is never read, and pyarrow writes indices there that point into an empty dictionary.
        if "UTF8" not in str(error) and "Dictionary indices" not in str(error):
            raise
        for column in batch.columns:
            _check_what_is_read(arrow, column)
    return batch


def _check_what_is_read(arrow: Any, array: Any) -> None:
    """Check the parts of an array that are read.

    The encoding of text is not checked.
    """
    array.validate()
    types, kind = arrow.types, array.type
    if isinstance(array, arrow.ExtensionArray):
        _check_what_is_read(arrow, array.storage)
    elif types.is_dictionary(kind):
        last = len(array.dictionary) - 1
        codes = array.indices.drop_null().to_numpy()
        if len(codes) and not 0 <= codes.min() <= codes.max() <= last:
            raise arrow.ArrowInvalid(f"a dictionary index is out of bounds: not in [0, {last}]")
        _check_what_is_read(arrow, array.dictionary)
    elif types.is_struct(kind):
        for child in array.flatten():
            _check_what_is_read(arrow, child)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        _without_values(arrow, array).validate(full=True)
        _check_what_is_read(arrow, array.flatten())
    else:
        _as_bytes(arrow, array).validate(full=True)


def _without_values(arrow: Any, lists: Any) -> Any:
    """Lists with the same offsets, of nulls."""
    kind, values = lists.type, arrow.nulls(len(lists.values))
    if arrow.types.is_fixed_size_list(kind):
        of_nulls = arrow.list_(values.type, kind.list_size)
    else:
        of_nulls = (arrow.list_ if arrow.types.is_list(kind) else arrow.large_list)(values.type)
    mine = lists.buffers()[: of_nulls.num_buffers]
    return arrow.Array.from_buffers(of_nulls, len(lists), mine, offset=lists.offset, children=[values])


def _as_bytes(arrow: Any, array: Any) -> Any:
    """View text as bytes, over the same buffers."""
    kind, flat = array.type, {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}
    flat[arrow.string_view()] = arrow.binary_view()
    return array.view(flat.get(kind, kind))
