"""Offsets of the messages of Arrow files and streams, so that each record batch can be read by itself."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.file_objects import Read

# https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
MAGIC = b"ARROW1"


SCHEMA, DICTIONARY, BATCH = 1, 2, 3


BLOCK = struct.Struct("<qi4xq")


_TAIL_NBYTES = 4 + len(MAGIC)


_GLANCE_NBYTES = 64 << 10


_CONTINUATION = b"\xff\xff\xff\xff"


_PREFACE = struct.Struct("<IIIII")


_UINT8, _UINT16, _UINT32 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I")


_INT32, INT64 = struct.Struct("<i"), struct.Struct("<q")


class DamagedError(Exception):
    """An object that is no whole Arrow file or stream; the text says why."""


class Layout(NamedTuple):
    """Offsets of the messages of an object, without empty record batches."""

    head: bytes
    """A FlatBuffer that contains the schema: a footer, or the message at the start of a stream."""
    schema_at: int
    """Offset of the schema's table in `head`."""
    is_file: bool
    """In a file all dictionaries hold for all batches, wherever they are."""
    dictionaries: NDArray[np.int64]
    """Rows of (start, start of the body, stop, id, is a delta)."""
    batches: NDArray[np.int64]
    """Rows of (start, start of the body, stop, number of rows)."""

    def needed(self, batch: int, ids: frozenset[int]) -> list[tuple[int, int, int]]:
        """(start, start of the body, stop) of the dictionaries with these ids that a batch uses, in file order."""
        before = int(self.batches[batch, 0])
        found: dict[int, list[tuple[int, int, int]]] = {}
        for start, body, stop, number, is_delta in self.dictionaries.tolist():
            if number in ids and (self.is_file or start < before):
                found[number] = [*(found.get(number, []) if is_delta else []), (start, body, stop)]
        return sorted(block for blocks in found.values() for block in blocks)


class FlatTable:
    """A table in a FlatBuffer (https://flatbuffers.dev/internals); fields go by their number in the schema.

    An offset that leads out of the buffer raises `struct.error`.
    """

    def __init__(self, buffer: memoryview, at: int) -> None:
        self.buffer, self.at = buffer, at
        self._fields = at - _unpack(_INT32, buffer, at)

    @classmethod
    def root(cls, buffer: memoryview) -> FlatTable:
        return cls(buffer, _unpack(_UINT32, buffer, 0))

    def place(self, field: int) -> int | None:
        """Offset of a field in the buffer; None if it is not written."""
        entry = 4 + 2 * field
        if entry + 2 > _unpack(_UINT16, self.buffer, self._fields):
            return None
        offset = _unpack(_UINT16, self.buffer, self._fields + entry)
        return self.at + offset if offset else None

    def scalar(self, field: int, form: struct.Struct) -> int:
        """A number; 0, the default of all that Arrow has, where it is not written."""
        at = self.place(field)
        return 0 if at is None else _unpack(form, self.buffer, at)

    def table(self, field: int) -> FlatTable | None:
        at = self.place(field)
        return None if at is None else FlatTable(self.buffer, at + _unpack(_UINT32, self.buffer, at))

    def required(self, field: int) -> FlatTable:
        found = self.table(field)
        if found is None:
            raise DamagedError("a table of its metadata is missing")
        return found

    def vector(self, field: int, nbytes: int) -> tuple[int, int]:
        """Offset and number of the elements, of so many bytes each."""
        at = self.place(field)
        if at is None:
            return 0, 0
        at += _unpack(_UINT32, self.buffer, at) + 4
        count = _unpack(_UINT32, self.buffer, at - 4)
        if at + count * nbytes > len(self.buffer):
            raise DamagedError("a vector of its metadata is cut short")
        return at, count

    def tables(self, field: int) -> list[FlatTable]:
        at, count = self.vector(field, 4)
        places = range(at, at + 4 * count, 4)
        return [FlatTable(self.buffer, place + _unpack(_UINT32, self.buffer, place)) for place in places]


def _unpack(form: struct.Struct, buffer: memoryview, at: int) -> int:
    if at < 0:
        raise struct.error("an offset leads out of the buffer")
    value: int = form.unpack_from(buffer, at)[0]
    return value


def _prefix_nbytes(message: memoryview) -> int:
    return 8 if bytes(message[:4]) == _CONTINUATION else 4  # before Arrow 0.15 there was only the length


def message_table(message: memoryview) -> FlatTable:
    return FlatTable.root(message[_prefix_nbytes(message) :])


class _Found(NamedTuple):
    """A message of an object."""

    start: int
    body: int
    stop: int
    metadata: bytes
    """With the prefix."""

    @property
    def table(self) -> FlatTable:
        return message_table(memoryview(self.metadata))

    @property
    def kind(self) -> int:
        return self.table.scalar(1, _UINT8)

    @property
    def dictionary(self) -> tuple[int, int, int, int, int]:
        """A row of `Layout.dictionaries`."""
        header = self.table.required(2)
        return self.start, self.body, self.stop, header.scalar(0, INT64), header.scalar(2, _UINT8)

    @property
    def batch(self) -> tuple[int, int, int, int]:
        """A row of `Layout.batches`."""
        return self.start, self.body, self.stop, self.table.required(2).scalar(0, INT64)


def _found(metadata: memoryview, start: int, nbytes: int) -> _Found:
    body = start + len(metadata)
    stop = body + message_table(metadata).scalar(3, INT64)
    if not body <= stop <= nbytes:
        raise DamagedError(f"the message at byte {start} is cut short")
    return _Found(start, body, stop, bytes(metadata))


class _Forward:
    """Bytes that come block by block, asked for in order; skipped ones need not be read."""

    def __init__(self, nbytes: int, blocks: Callable[[int], Iterator[tuple[int, memoryview]]]) -> None:
        self.nbytes, self._blocks = nbytes, blocks
        self._coming = blocks(0)
        self._first, self._data = 0, memoryview(b"")

    def at(self, start: int, stop: int) -> memoryview:
        while stop > self._first + len(self._data):
            end = self._first + len(self._data)
            kept = self._data[start - self._first :] if start < end else memoryview(b"")
            if start > end + len(self._data):
                self._coming, end = self._blocks(start), start
            first, data = next(self._coming)
            assert first == end
            self._first, self._data = (first - len(kept), memoryview(bytes(kept) + data)) if kept else (first, data)
        return self._data[start - self._first : stop - self._first]

    def messages(self) -> Iterator[_Found | None]:
        """All of them; None for the end of a stream, which another may follow."""
        at = 0
        while at < self.nbytes:
            prefix = self.at(at, min(at + 8, self.nbytes))
            first = _prefix_nbytes(prefix)
            length = int.from_bytes(prefix[first - 4 : first], "little", signed=True)
            if length == 0 and len(prefix) >= first:
                at += first
                yield None
                continue
            if length <= 0 or at + first + length > self.nbytes:
                raise DamagedError(f"no message begins at byte {at}, or it is cut short")
            found = _found(self.at(at, at + first + length), at, self.nbytes)
            yield found
            at = found.stop


def layout_of(nbytes: int, read: Read, blocks: Callable[[int], Iterator[tuple[int, memoryview]]]) -> bytes:
    """The packed layout of `nbytes` bytes, of which `read` gives ranges; DamagedError if it is none.

    Of a file the footer and metadata are read. A stream has no table of contents: it is gone through in
    `blocks(start)`, which gives offsets and bytes from there on.
    """
    try:
        if nbytes < 8:
            raise DamagedError(f"it has {nbytes} bytes")
        head, tail = read([(0, len(MAGIC)), (max(0, nbytes - _GLANCE_NBYTES), nbytes)])
        return _of_file(nbytes, read, tail) if bytes(head) == MAGIC else _of_stream(_Forward(nbytes, blocks))
    except struct.error as error:
        raise DamagedError(f"its metadata are damaged: {error}") from error


def _of_file(nbytes: int, read: Read, tail: memoryview) -> bytes:
    length = int.from_bytes(tail[-_TAIL_NBYTES : -len(MAGIC)], "little")
    stop = nbytes - _TAIL_NBYTES
    if bytes(tail[-len(MAGIC) :]) != MAGIC or not 0 < length <= stop:
        raise DamagedError("there is no footer at its end")
    in_tail = length + _TAIL_NBYTES <= len(tail)
    data = tail[-length - _TAIL_NBYTES : -_TAIL_NBYTES] if in_tail else read([(stop - length, stop)])[0]
    footer = FlatTable.root(memoryview(bytes(data)))
    dictionaries = _listed(footer, 2, DICTIONARY, nbytes, read)
    batches = _listed(footer, 3, BATCH, nbytes, read)
    return _packed(footer.buffer, footer.required(1).at, True, dictionaries, batches)


def _listed(footer: FlatTable, field: int, kind: int, nbytes: int, read: Read) -> list[_Found]:
    """The messages that a footer lists."""
    at, count = footer.vector(field, BLOCK.size)
    blocks = list(BLOCK.iter_unpack(footer.buffer[at : at + count * BLOCK.size]))
    for start, length, body in blocks:
        if not 0 <= start < start + length <= start + length + body <= nbytes:
            raise DamagedError(f"its footer names the bytes from {start} on, which it does not have")
    spans = [(start, start + length) for start, length, _ in blocks]
    found = [_found(data, start, nbytes) for (start, _), data in zip(spans, read(spans), strict=True)]
    for each, (start, _, body) in zip(found, blocks, strict=True):
        if each.kind != kind or each.stop - each.body != body:
            raise DamagedError(f"its footer does not tell what lies at byte {start}")
    return found


def _of_stream(forward: _Forward) -> bytes:
    messages = forward.messages()
    first = next(messages, None)
    if first is None or first.kind != SCHEMA:
        raise DamagedError("it does not begin with a schema")
    found: dict[int, list[_Found]] = {DICTIONARY: [], BATCH: []}
    has_ended = False
    for message in messages:
        if message is None:
            has_ended = True
        elif message.kind == SCHEMA and has_ended:
            if message.metadata != first.metadata:
                raise DamagedError(
                    f"streams follow each other in it, and the one from byte {message.start} on has another schema"
                )
            has_ended = False
        elif message.kind not in found or has_ended:
            raise DamagedError(f"a message of kind {message.kind} lies at byte {message.start}")
        else:
            found[message.kind].append(message)
    head = first.table
    return _packed(head.buffer, head.required(2).at, False, found[DICTIONARY], found[BATCH])


def _packed(head: memoryview, at: int, is_file: bool, dictionaries: list[_Found], batches: list[_Found]) -> bytes:
    """As `unpacked` takes it; the metadata of the batches come last."""
    filled = [each for each in batches if each.batch[3]]
    numbers = [each for found in dictionaries for each in found.dictionary] + [
        each for found in filled for each in found.batch
    ]
    sizes = _PREFACE.pack(is_file, at, len(head), len(dictionaries), len(filled))
    return b"".join([sizes, head, np.array(numbers, "<i8").tobytes(), *(each.metadata for each in filled)])


def unpacked(data: bytes | memoryview) -> Layout:
    is_file, at, size, dictionaries, batches = _PREFACE.unpack_from(data)
    first = _PREFACE.size + size
    second = 5 * dictionaries
    numbers = np.frombuffer(bytes(data[first : first + 8 * (second + 4 * batches)]), "<i8")
    head = bytes(data[_PREFACE.size : first])
    return Layout(head, at, bool(is_file), numbers[:second].reshape(-1, 5), numbers[second:].reshape(-1, 4))


def dictionary_ids(field: FlatTable) -> Iterator[int]:
    """Of the dictionaries of a field and of those within it."""
    if (encoding := field.table(4)) is not None:
        yield encoding.scalar(0, INT64)
    for child in field.tables(5):
        yield from dictionary_ids(child)
