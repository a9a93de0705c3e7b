"""Where the messages of an Arrow file or stream lie, so that each record batch can be read by itself."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.flatbuffers import Table
from feedline.datasets.ipc_bodies import Bodies, Body, body_of
from feedline.datasets.uncached import Read
from feedline.stores.protocol import Range

# https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
_MAGIC = b"ARROW1"
_HEAD_NBYTES = 8
_TAIL_NBYTES = 10
_CONTINUATION = b"\xff\xff\xff\xff"
_GLANCE_NBYTES = 64 << 10
_BYTE, _INT16, _INT64 = struct.Struct("<B"), struct.Struct("<h"), struct.Struct("<q")
_BLOCK = struct.Struct("<qi4xq")
_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3
_VERSION, _HEADER_TYPE, _HEADER, _BODY_NBYTES = 0, 1, 2, 3
_V5 = 4
"""Arrow 1.0: before it unions had more buffers, and what buffers are compressed with was told elsewhere."""
_ENDIANNESS = 0
_DICTIONARIES, _BATCHES = 2, 3
_PREFACE = struct.Struct("<IIII")


class DamagedError(Exception):
    """What was looked into is no whole Arrow file or stream; the text says why."""


class Layout(NamedTuple):
    """What lies where in a file or stream, in its order."""

    is_file: bool
    """All dictionaries count before all batches, wherever they lie."""
    schema: bytes
    """Its message."""
    dictionaries: NDArray[np.int64]
    """Rows of (start, stop, id, is a delta)."""
    batches: NDArray[np.int64]
    """Rows of (start, stop, rows of the batch)."""
    bodies: Bodies
    """Of each batch, in all its columns."""

    def needed(self, batch: int, dictionaries: Collection[int] | None = None) -> list[Range]:
        """The messages that have to be read, in this order, to read a batch: dictionaries, then the batch itself.

        Only these dictionaries, if they are named.
        """
        start, stop, _ = self.batches[batch].tolist()
        wanted: dict[int, list[Range]] = {}
        for first, last, number, delta in self.dictionaries.tolist():
            if (self.is_file or first < start) and (dictionaries is None or number in dictionaries):
                wanted[number] = [*wanted.get(number, []), (first, last)] if delta else [(first, last)]
        return [*sorted(span for spans in wanted.values() for span in spans), (start, stop)]

    def packed(self) -> bytes:
        """As bytes, for `unpacked`."""
        sizes = _PREFACE.pack(self.is_file, len(self.schema), len(self.dictionaries), len(self.batches))
        numbers = [self.dictionaries, self.batches, self.bodies.sizes, self.bodies.numbers]
        return b"".join([sizes, self.schema, *(each.tobytes() for each in numbers)])


def unpacked(data: bytes | memoryview) -> Layout:
    """The layout that `packed` gave."""
    is_file, schema, dictionaries, batches = _PREFACE.unpack_from(data)
    first = _PREFACE.size + schema
    numbers = np.frombuffer(bytes(data[first:]), np.int64)
    second = 4 * dictionaries
    third = second + 3 * batches
    return Layout(
        bool(is_file),
        bytes(data[_PREFACE.size : first]),
        numbers[:second].reshape(-1, 4),
        numbers[second:third].reshape(-1, 3),
        Bodies(numbers[third : third + batches], numbers[third + batches :]),
    )


def layout_of(nbytes: int, read: Read, blocks: Callable[[int], Iterator[tuple[int, memoryview]]]) -> Layout:
    """The layout of `nbytes` bytes, of which `read` gives ranges; DamagedError if it is none.

    Of a file little is read. A stream has no table of contents: all of it is gone through, in `blocks(start)`, which
    gives places and bytes from there on, one after the other.
    """
    try:
        if nbytes < _HEAD_NBYTES:
            raise DamagedError(f"it has {nbytes} bytes")
        head, tail = read([(0, min(nbytes, _GLANCE_NBYTES)), (max(0, nbytes - _GLANCE_NBYTES), nbytes)])
        if bytes(head[: len(_MAGIC)]) == _MAGIC:
            return _of_file(_Whole(nbytes, read, head), tail)
        return _of_stream(_Forward(nbytes, blocks))
    except struct.error as error:
        raise DamagedError(f"its metadata are damaged: {error}") from error


def schema_in(message: bytes) -> Table:
    """What the message of a layout's schema says."""
    return _only(memoryview(message)).header


def dictionary_in(message: memoryview) -> tuple[int, Body]:
    """The number of a dictionary, and where in its message its values lie."""
    found = _only(message)
    body = found.body()
    if found.kind != _DICTIONARY or body is None:
        raise DamagedError(f"a message of kind {found.kind} is no dictionary")
    return found.header.scalar(0, _INT64), body


class _Message(NamedTuple):
    start: int
    body_start: int
    stop: int
    version: int
    kind: int
    header: Table

    def row(self) -> tuple[int, ...]:
        """What a layout holds of a message with data."""
        if self.kind == _DICTIONARY:
            return self.start, self.stop, self.header.scalar(0, _INT64), self.header.scalar(2, _BYTE)
        return self.start, self.stop, self.header.scalar(0, _INT64)

    def body(self) -> Body | None:
        """What lies where in a message with data, if it is one that can be read in parts."""
        batch = self.header.table(1) if self.kind == _DICTIONARY else self.header
        return body_of(batch, self.body_start, self.stop) if self.version == _V5 else None


class _Whole:
    """Bytes that can be had from anywhere, of which the first were read."""

    def __init__(self, nbytes: int, read: Read, head: memoryview) -> None:
        self.nbytes, self._read, self._head = nbytes, read, head

    def at(self, start: int, stop: int) -> memoryview:
        return self._head[start:stop] if stop <= len(self._head) else self._read([(start, stop)])[0]

    def many(self, spans: Sequence[Range]) -> list[memoryview]:
        return self._read(spans)


class _Forward:
    """Bytes that come block by block, asked for in order; what is skipped need not be read."""

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


def _of_file(whole: _Whole, tail: memoryview) -> Layout:
    length = int.from_bytes(tail[-_TAIL_NBYTES : -len(_MAGIC)], "little")
    stop = whole.nbytes - _TAIL_NBYTES
    if bytes(tail[-len(_MAGIC) :]) != _MAGIC or not 0 < length <= stop:
        raise DamagedError("there is no footer at its end")
    in_tail = length + _TAIL_NBYTES <= len(tail)
    footer = Table.root(tail[-length - _TAIL_NBYTES : -_TAIL_NBYTES] if in_tail else whole.at(stop - length, stop))
    schema = _message_at(whole, _HEAD_NBYTES)
    if schema is None or schema.kind != _SCHEMA:
        raise DamagedError("it does not begin with a schema")
    dictionaries = list(_listed(whole, footer.structs(_DICTIONARIES, _BLOCK), _DICTIONARY))
    batches = list(_listed(whole, footer.structs(_BATCHES, _BLOCK), _RECORDS))
    return _layout(True, bytes(whole.at(schema.start, schema.stop)), dictionaries, batches)


def _listed(whole: _Whole, blocks: Sequence[tuple[int, ...]], kind: int) -> Iterator[_Message]:
    """The messages that a footer names."""
    for start, length, body in blocks:
        if not (0 <= start <= start + length <= start + length + body <= whole.nbytes):
            raise DamagedError(f"its footer names the bytes from {start} on, which it does not have")
    spans = [(start, start + length) for start, length, _ in blocks]
    for (start, stop), (_, _, body), data in zip(spans, blocks, whole.many(spans), strict=True):
        message = _message(data[4 if bytes(data[:4]) != _CONTINUATION else 8 :], start, stop)
        if message.kind != kind or message.stop != stop + body:
            raise DamagedError(f"its footer does not tell what lies at byte {start}")
        yield message


def _of_stream(forward: _Forward) -> Layout:
    schema = _message_at(forward, 0)
    if schema is None or schema.kind != _SCHEMA:
        raise DamagedError("it does not begin with a schema")
    text = bytes(forward.at(schema.start, schema.stop))
    found: dict[int, list[_Message]] = {_DICTIONARY: [], _RECORDS: []}
    at = schema.stop
    while (message := _message_at(forward, at)) is not None:
        if message.kind not in found:
            raise DamagedError(f"a message of kind {message.kind} lies at byte {at}")
        found[message.kind].append(message)
        at = message.stop
    return _layout(False, text, found[_DICTIONARY], found[_RECORDS])


def _layout(is_file: bool, schema: bytes, dictionaries: Sequence[_Message], batches: Sequence[_Message]) -> Layout:
    is_little_endian = schema_in(schema).scalar(_ENDIANNESS, _INT16) == 0
    in_parts = is_little_endian and all(each.body() is not None for each in dictionaries)
    bodies = Bodies.of(each.body() if in_parts else None for each in batches)
    return Layout(is_file, schema, _rows(4, dictionaries), _rows(3, batches), bodies)


def _only(data: memoryview) -> _Message:
    message = _message_at(_Whole(len(data), lambda _: [], data), 0)
    if message is None:
        raise DamagedError("a message is empty")
    return message


def _message_at(source: _Whole | _Forward, at: int) -> _Message | None:
    """The message that begins there; None at the end."""
    if at == source.nbytes:
        return None
    prefix = source.at(at, min(at + 8, source.nbytes))
    first = 8 if bytes(prefix[:4]) == _CONTINUATION else 4  # before Arrow 0.15 there was only the length
    length = int.from_bytes(prefix[first - 4 : first], "little", signed=True)
    if length == 0 and len(prefix) >= first:
        return None
    stop = at + first + length
    if length <= 0 or stop > source.nbytes:
        raise DamagedError(f"no message begins at byte {at}, or it is cut short")
    message = _message(source.at(at, stop)[first:], at, stop)
    if not stop <= message.stop <= source.nbytes:
        raise DamagedError(f"the message at byte {at} is cut short")
    return message


def _message(metadata: memoryview, start: int, body: int) -> _Message:
    table = Table.root(memoryview(bytes(metadata)))  # whatever else was read with it need not be held
    return _Message(
        start,
        body,
        body + table.scalar(_BODY_NBYTES, _INT64),
        table.scalar(_VERSION, _INT16),
        table.scalar(_HEADER_TYPE, _BYTE),
        table.table(_HEADER),
    )


def _rows(width: int, messages: Iterable[_Message]) -> NDArray[np.int64]:
    return np.array([message.row() for message in messages], np.int64).reshape(-1, width)
