"""Record batches of Arrow files and streams in stores, each read by itself with pyarrow's reader."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import LRUCache, PerProcess
from feedline.core.threads import BoundedMap, DaemonPool
from feedline.datasets.file_objects import RangeFile, merge_ranges
from feedline.datasets.indexes import MetadataCache, key_of
from feedline.datasets.tables.arrow_messages import (
    BATCH,
    BLOCK,
    DICTIONARY,
    INT64,
    MAGIC,
    DamagedError,
    FlatTable,
    Layout,
    dictionary_ids,
    layout_of,
    message_table,
    unpacked,
)
from feedline.datasets.tables.chunks import StructChunk, table_chunk
from feedline.datasets.tables.types import StructType, check_same_columns, kinds_of, pyarrow
from feedline.errors import SampleError
from feedline.stores import CachedStore, ObjectRange
from feedline.stores.base import Range
from feedline.stores.files import Extent, FileSet
from feedline.stores.requests import FetchedRanges

T = TypeVar("T")


_log = logging.getLogger("feedline")


_WHAT = "datasets.Arrow"


_PLANS = 4096


_BLOCK_NBYTES = 16 << 20


_LAID_OUT_AT_ONCE = 8
"""Objects examined at the same time, with one block of each in memory."""


_SLOT_NBYTES = 16


_V5 = 4


class _Choice(NamedTuple):
    """The chosen columns in one schema."""

    fields: list[int]
    are_all: bool
    dictionaries: frozenset[int]
    """Ids of the dictionaries that they use."""


class _Plan(NamedTuple):
    """The reading of one record batch: metadata that pyarrow is shown, and the ranges behind it."""

    metadata: bytes | None
    """With the chosen buffers close together; None if the message is read whole, as the only buffer."""
    dictionaries: list[tuple[int, int, int]]
    buffers: list[Range]
    offsets: list[int]
    """Of the chosen buffers in the body that pyarrow is shown; of the body in a whole message."""
    body_nbytes: int
    """Of that body."""

    @property
    def spans(self) -> list[Range]:
        """Ranges of the object that are read."""
        return merge_ranges([*((start, stop) for start, _, stop in self.dictionaries), *self.buffers])

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.buffers)


class ArrowObjects:
    """Non-empty record batches of all objects, in order. Pickling keeps their byte offsets, not their metadata.

    If some columns are chosen, only their buffers are read.
    """

    def __init__(self, blobs: FileSet, columns: Sequence[str] | None, index: str) -> None:
        self._blobs, self._kept = blobs, MetadataCache(index)
        self._layouts = _layouts(blobs, self._kept)
        self.kind = _kind(self._layouts, blobs.names, columns)
        self.sizes: NDArray[np.int64] = np.concatenate([layout.batches[:, 3] for layout in self._layouts])
        self._bounds = np.concatenate(([0], np.cumsum(self.sizes)))
        self._first = np.cumsum([0, *(len(layout.batches) for layout in self._layouts)])
        self._concurrently = BoundedMap()
        self._plans: PerProcess[LRUCache[int, _Plan]] = PerProcess(partial(LRUCache, _PLANS))
        self._choices: PerProcess[dict[bytes, _Choice]] = PerProcess(dict)

    def decoded(self, number: int) -> StructChunk:
        """The chosen columns of a record batch."""
        batch = self.batch(number)
        with self._naming(number):
            return table_chunk(self.kind, batch)

    def batch(self, number: int) -> Any:
        """The chosen columns of a record batch as pyarrow gives them, validated."""
        blob, _ = self._place(number)
        plan = self._plan(number)
        spans = plan.spans
        held = _Held(spans, self._blobs[blob].read(spans))
        with self._naming(number):
            return validated(self._read(blob, plan, held))

    def each(self, work: Callable[[int], T], numbers: Sequence[int], limit_nbytes: int) -> Iterator[T]:
        """`work` of each of these record batches, in order, on several at once."""
        return self._concurrently.map(work, numbers, lambda number: self._plan(number).nbytes, limit_nbytes)

    def ranges(self, numbers: Sequence[int]) -> list[tuple[CachedStore, ObjectRange]]:
        """Ranges that decoding these record batches reads through caches."""
        places = [(self._place(number)[0], span) for number in numbers for span in self._plan(number).spans]
        return self._blobs.ranges([Extent(blob, *span) for blob, span in places])

    def locate(self, number: int, row: int) -> str:
        """The object of a row, and its number in that object."""
        blob, _ = self._place(number)
        return f"{self._blobs.name(blob)}, row {int(self._bounds[number] - self._bounds[self._first[blob]]) + row}"

    def _place(self, number: int) -> tuple[int, int]:
        blob = int(np.searchsorted(self._first, number, side="right")) - 1
        return blob, number - int(self._first[blob])

    def _choice(self, layout: Layout) -> _Choice:
        choices = self._choices()
        if layout.head not in choices:
            choices[layout.head] = _choice(layout, {name for name, _ in self.kind.fields})
        return choices[layout.head]

    def _plan(self, number: int) -> _Plan:
        plans = self._plans()
        found = plans.get(number)
        return plans.put(number, self._planned(number)) if found is None else found

    def _planned(self, number: int) -> _Plan:
        blob, place = self._place(number)
        layout = self._layouts[blob]
        choice = self._choice(layout)
        start, body, stop, _ = layout.batches[place].tolist()
        dictionaries = layout.needed(place, choice.dictionaries)
        if choice.are_all:
            return _Plan(None, dictionaries, [(start, stop)], [body - start], 0)
        metadata = self._metadata(blob, place)
        with self._naming(number):
            return _plan(layout, place, metadata, choice, dictionaries)

    def _metadata(self, blob: int, place: int) -> bytes:
        """From the index if it has them, which others may have replaced."""
        batches = self._layouts[blob].batches
        kept = self._kept.get(key_of(self._blobs.name(blob), self._blobs.info(blob)))
        if kept is None:
            return bytes(self._blobs[blob].read_uncached([(int(batches[place, 0]), int(batches[place, 1]))])[0])
        sizes = batches[:, 1] - batches[:, 0]
        first = len(kept) - int(sizes[place:].sum())
        return bytes(kept[first : first + int(sizes[place])])

    def _read(self, blob: int, plan: _Plan, held: _Held) -> Any:
        layout = self._layouts[blob]
        writer = _VirtualFile(layout)
        for start, body, stop in plan.dictionaries:
            writer.add(DICTIONARY, held.cut(start, body), [(0, held.cut(body, stop))], stop - body)
        if plan.metadata is None:
            (start, stop), body = plan.buffers[0], plan.buffers[0][0] + plan.offsets[0]
            writer.add(BATCH, held.cut(start, body), [(0, held.cut(body, stop))], stop - body)
            return writer.reader(None).get_batch(0)
        pieces = [(at, held.cut(*span)) for at, span in zip(plan.offsets, plan.buffers, strict=True)]
        writer.add(BATCH, memoryview(plan.metadata), pieces, plan.body_nbytes)
        return writer.reader(self._choice(layout).fields).get_batch(0)

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Errors of a damaged record batch name it."""
        try:
            yield
        except (pyarrow(_WHAT).ArrowException, OSError, DamagedError, IndexError, struct.error) as error:
            blob, place = self._place(number)
            raise damaged(f"record batch {place} of {self._blobs.name(blob)}", error) from error


def validated(batch: Any, *, in_place: bool = False) -> Any:
    """The record batch, after a check that no offset, view, index or run leads out of its buffers.

    With `in_place` only columns are read whose use reads them whole: views and runs. Offsets of others are checked row
    by row. Text that is not UTF-8 passes: an error names its row when that is read.
    """
    arrow = pyarrow(_WHAT)
    if in_place:
        batch.validate()
        for column in batch.columns:
            if any(layout in str(column.type) for layout in ("view", "run_end_encoded")):
                _without_text(arrow, column).validate(full=True)
        return batch
    try:
        batch.validate(full=True)
    except arrow.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        for column in batch.columns:
            _without_text(arrow, column).validate(full=True)
    return batch


def _without_text(arrow: Any, array: Any) -> Any:
    """The array with bytes in place of text, over the same buffers."""
    if isinstance(array, arrow.ExtensionArray):
        return _without_text(arrow, array.storage)
    if isinstance(array, arrow.DictionaryArray):
        return arrow.DictionaryArray.from_arrays(array.indices, _without_text(arrow, array.dictionary), safe=False)
    return array.view(_byte_type(arrow, array.type))


def _byte_type(arrow: Any, kind: Any) -> Any:
    flat = {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}
    flat[arrow.string_view()] = arrow.binary_view()
    if kind in flat:
        return flat[kind]
    types = arrow.types
    if types.is_struct(kind):
        return arrow.struct([(field.name, _byte_type(arrow, field.type)) for field in kind])
    if types.is_fixed_size_list(kind):
        return arrow.list_(_byte_type(arrow, kind.value_type), kind.list_size)
    if types.is_list(kind):
        return arrow.list_(_byte_type(arrow, kind.value_type))
    return arrow.large_list(_byte_type(arrow, kind.value_type)) if types.is_large_list(kind) else kind


class _Held(FetchedRanges):
    """Bytes of an object, all of which were read."""

    def cut(self, start: int, stop: int) -> memoryview:
        found = super().find(start, stop)
        if found is None:
            raise DamagedError(f"the bytes from {start} to {stop} are missing")
        return found


class _VirtualFile(RangeFile):
    """An Arrow file for pyarrow: a few messages of an object, one after the other, and a footer for them.

    So files and streams are read alike, and dictionaries that change within a stream. `asked` are the ranges that
    pyarrow read; bytes that no part holds are zeros.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(0)
        self.asked: list[Range] = []
        self._layout = layout
        self._spans: list[Range] = []
        self._views: list[memoryview] = []
        self._held = FetchedRanges()
        self._blocks: dict[int, list[bytes]] = {DICTIONARY: [], BATCH: []}
        self._put(0, memoryview(MAGIC))
        self._nbytes = 8

    def add(self, kind: int, metadata: memoryview, pieces: Sequence[tuple[int, memoryview]], body_nbytes: int) -> int:
        """Append a message whose body has these pieces by offset; gives the offset of the body in this file."""
        start, body = self._nbytes, self._nbytes + len(metadata)
        self._blocks[kind].append(BLOCK.pack(start, len(metadata), body_nbytes))
        for at, view in [(start, metadata), *((body + at, view) for at, view in pieces)]:
            self._put(at, view)
        self._nbytes = -(-(body + body_nbytes) // 8) * 8  # pyarrow refuses blocks that are not aligned
        return body

    def reader(self, fields: list[int] | None) -> Any:
        """A reader of these fields, None meaning all; nothing can be added after it."""
        arrow = pyarrow(_WHAT)
        footer = _footer(self._layout, self._blocks[DICTIONARY], self._blocks[BATCH])
        tail = footer + len(footer).to_bytes(4, "little") + MAGIC
        self._put(self._nbytes, memoryview(tail))
        self._nbytes += len(tail)
        self._held = FetchedRanges(self._spans, self._views)
        options = arrow.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
        return arrow.ipc.open_file(arrow.PythonFile(self, "r"), options=options)

    def _put(self, at: int, view: memoryview) -> None:
        if len(view):
            self._spans.append((at, at + len(view)))
            self._views.append(view)

    def _bytes(self, start: int, stop: int) -> memoryview:
        self.asked.append((start, stop))
        held = self._held.find(start, stop)
        return self._assembled(start, stop) if held is None else held

    def _assembled(self, start: int, stop: int) -> memoryview:
        data = bytearray(stop - start)
        for (first, last), view in zip(self._spans, self._views, strict=True):
            lower, upper = max(first, start), min(last, stop)
            if lower < upper:
                data[lower - start : upper - start] = view[lower - first : upper - first]
        return memoryview(data)


def _footer(layout: Layout, dictionaries: Sequence[bytes], batches: Sequence[bytes]) -> bytes:
    """The FlatBuffer of a footer: its own table and blocks, then `head` as it is, whose schema it refers to.

    FlatBuffers refer by relative offset, so that a whole one can be part of another.
    """
    first = 36  # elements of 8-byte numbers have to lie at multiples of 8, the count before them
    second = first + 4 + 24 * len(dictionaries) + 4
    head = second + 4 + 24 * len(batches)
    parts = [
        struct.pack("<I6H", 16, 12, 20, 4, 8, 12, 16),  # the table's offset; sizes, and offsets of its fields
        struct.pack("<ihxxIII", 12, _V5, head + layout.schema_at - 24, first - 28, second - 32),
        struct.pack("<I", len(dictionaries)),
        *dictionaries,
        struct.pack("<4xI", len(batches)),
        *batches,
        layout.head,
    ]
    return b"".join(parts)


def _choice(layout: Layout, names: set[str]) -> _Choice:
    fields = FlatTable(memoryview(layout.head), layout.schema_at).tables(1)
    chosen = [number for number, name in enumerate(_schema(layout).names) if name in names]
    ids = frozenset(each for number in chosen for each in dictionary_ids(fields[number]))
    return _Choice(chosen, len(chosen) == len(fields), ids)


def _plan(
    layout: Layout, place: int, metadata: bytes, choice: _Choice, dictionaries: list[tuple[int, int, int]]
) -> _Plan:
    """The buffers of the chosen columns are those that pyarrow reads of a body with each in a slot of its own."""
    _, body, stop, _ = layout.batches[place].tolist()
    message = message_table(memoryview(metadata))
    batch = message.required(2)
    at, count = batch.vector(2, 16)
    first = len(metadata) - len(message.buffer) + at
    buffers = np.frombuffer(metadata, "<i8", 2 * count, first).reshape(-1, 2)
    ends = buffers.sum(axis=1)
    if (buffers < 0).any() or (ends < 0).any() or (ends > stop - body).any():
        raise DamagedError("a buffer lies outside of it")
    slots = np.arange(count) * _SLOT_NBYTES

    def shown(offsets: NDArray[np.int64], lengths: NDArray[np.int64], nbytes: int) -> bytes:
        data = bytearray(metadata)
        data[first : first + 16 * count] = np.stack([offsets, lengths], axis=1).astype("<i8").tobytes()
        if (length_at := message.place(3)) is not None:
            INT64.pack_into(data, len(metadata) - len(message.buffer) + length_at, nbytes)
        return bytes(data)

    file = _VirtualFile(layout)
    dry = shown(slots, np.minimum(buffers[:, 1], 8), count * _SLOT_NBYTES)
    begin = file.add(BATCH, memoryview(dry), [], count * _SLOT_NBYTES)
    reader = file.reader(choice.fields)
    file.asked.clear()
    with suppress(pyarrow(_WHAT).ArrowException, OSError):  # dictionaries are missing, and compressed data are none
        reader.get_batch(0)
    asked = np.zeros(count, np.bool_)
    for low, high in file.asked:
        asked |= (slots + begin < high) & (slots + begin + 8 > low)
    asked &= buffers[:, 1] > 0
    steps = np.where(asked, buffers[:, 1] // 8 * 8 + 8, 0)  # apart, so that each is read by itself
    offsets = np.where(asked, np.cumsum(steps) - steps, 0)
    spans = (buffers[asked, 0] + body, ends[asked] + body)
    return _Plan(
        shown(offsets, np.where(asked, buffers[:, 1], 0), int(steps.sum())),
        dictionaries,
        list(zip(*(each.tolist() for each in spans), strict=True)),
        offsets[asked].tolist(),
        int(steps.sum()),
    )


def _layouts(blobs: FileSet, kept: MetadataCache) -> list[Layout]:
    """Of all objects; those that the index lacks are examined, several at once."""
    keys = [key_of(blobs.name(number), blobs.info(number)) for number in range(len(blobs))]
    described = {number: found for number, key in enumerate(keys) if (found := kept.get(key)) is not None}
    lacking = [number for number in range(len(blobs)) if number not in described]
    if lacking:
        _log.info("%d Arrow objects are looked into, the first is %s", len(lacking), blobs.name(lacking[0]))
        with DaemonPool(_LAID_OUT_AT_ONCE) as pool:
            described |= zip(lacking, pool.map(partial(_laid_out, blobs), lacking), strict=True)
        kept.replace({key: described[number] for number, key in enumerate(keys)})
    heads: dict[bytes, bytes] = {}  # equal ones are held and pickled once
    layouts = [unpacked(described[number]) for number in range(len(blobs))]
    return [layout._replace(head=heads.setdefault(layout.head, layout.head)) for layout in layouts]


def _laid_out(blobs: FileSet, number: int) -> bytes:
    blob = blobs[number]

    def blocks(start: int) -> Iterator[tuple[int, memoryview]]:
        _log.info(
            "%s is an Arrow stream, which has no table of contents: it is read from byte %d on; written as a file"
            " (pyarrow.ipc.new_file), it need not be",
            blob.name,
            start,
        )
        for at in range(start, blob.nbytes, _BLOCK_NBYTES):
            yield at, blob.read([(at, min(at + _BLOCK_NBYTES, blob.nbytes))])[0]

    try:
        return layout_of(blob.nbytes, blob.read_uncached, blocks)
    except DamagedError as error:
        raise damaged(blob.name, error) from error


def _schema(layout: Layout) -> Any:
    return _VirtualFile(layout).reader(None).schema


def _kind(layouts: Sequence[Layout], names: Sequence[str], columns: Sequence[str] | None) -> StructType:
    """The kind of a sample, which all objects must have in common."""
    arrow = pyarrow(_WHAT)
    schemas: dict[bytes, Any] = {}
    first: dict[bytes, tuple[Any, str]] = {}
    for layout, name in zip(layouts, names, strict=True):
        if layout.head not in schemas:
            try:
                schemas[layout.head] = _schema(layout)
            except (arrow.ArrowException, OSError) as error:
                raise damaged(name, error) from error
            first.setdefault(schemas[layout.head].serialize().to_pybytes(), (schemas[layout.head], name))
    kinds = [kinds_of(schema, columns, name) for schema, name in first.values()]
    check_same_columns(kinds, [name for _, name in first.values()])
    return kinds[0]


def damaged(what: str, error: Exception) -> SampleError:
    """The error for an object or record batch that is not what Arrow writes."""
    return SampleError(f"{what} is no whole Arrow file or stream ({error}); write it again, or leave it out")
