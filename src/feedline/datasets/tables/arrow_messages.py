"""Offsets and metadata of the messages of Arrow files and streams."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.file_objects import ReadRanges
from feedline.datasets.flatbuffers import INT16, INT64, UINT8, DamagedError, FlatTable, unpack
from feedline.datasets.indexes import FooterRead

# https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
MAGIC = b"ARROW1"


SCHEMA, DICTIONARY, BATCH = 1, 2, 3


BLOCK = struct.Struct("<qi4xq")


_TAIL_NBYTES = 4 + len(MAGIC)


GLANCE_NBYTES = 64 << 10
"""Bytes read from the end of the first file; most footers are shorter."""


_END_NBYTES = 64
"""Number of bytes that are examined after the last message of a file: end marker and padding, or unexpected data."""


V5 = 4


_CONTINUATION = b"\xff\xff\xff\xff"


_PREFACE = struct.Struct("<IIIII")


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
        """Used dictionaries in file order: (start, start of the body, stop)."""
        before = int(self.batches[batch, 0])
        blocks: dict[int, list[tuple[int, int, int]]] = {}
        for start, body, stop, number, is_delta in self.dictionaries.tolist() if ids else ():
            if number in ids and (self.is_file or start < before):
                blocks[number] = [*(blocks.get(number, []) if is_delta else []), (start, body, stop)]
        return sorted(block for each in blocks.values() for block in each)


def _prefix_nbytes(message: memoryview) -> int:
    return 8 if bytes(message[:4]) == _CONTINUATION else 4  # before Arrow 0.15, the prefix was only the length


def message_table(message: memoryview) -> FlatTable:
    return FlatTable.root(message[_prefix_nbytes(message) :])


class _MessageOffsets(NamedTuple):
    """The offsets and metadata of a message."""

    start: int
    body: int
    stop: int
    metadata: bytes
    """Metadata with the prefix."""

    @property
    def table(self) -> FlatTable:
        return message_table(memoryview(self.metadata))

    @property
    def kind(self) -> int:
        return self.table.scalar(1, UINT8)

    @property
    def dictionary(self) -> tuple[int, int, int, int, int]:
        """A row of `Layout.dictionaries`."""
        header = self.table.required(2)
        return self.start, self.body, self.stop, header.scalar(0, INT64), header.scalar(2, UINT8)

    @property
    def batch(self) -> tuple[int, int, int, int]:
        """A row of `Layout.batches`."""
        header = self.table.required(2)
        rows = header.scalar(0, INT64)
        at, count = header.vector(1, 16)
        if rows < 0 or (count and unpack(INT64, header.buffer, at) != rows):
            # The length of a dataset is the sum of these numbers, so only the samples would reveal a wrong one.
            raise DamagedError(f"the record batch at byte {self.start} has {rows} rows, but its columns do not")
        return self.start, self.body, self.stop, rows


def _parse_message(metadata: memoryview, start: int, nbytes: int) -> _MessageOffsets:
    body = start + len(metadata)
    stop = body + message_table(metadata).scalar(3, INT64)
    if not body <= stop <= nbytes:
        raise DamagedError(f"the message at byte {start} is cut short")
    return _MessageOffsets(start, body, stop, bytes(metadata))


class _Forward:
    """Bytes of a stream, read in order, without skipped blocks."""

    def __init__(self, nbytes: int, blocks: Callable[[int], Iterator[tuple[int, memoryview]]]) -> None:
        self.nbytes, self._blocks = nbytes, blocks
        self._coming = blocks(0)
        self._first, self._data = 0, memoryview(b"")

    def at(self, start: int, stop: int) -> memoryview:
        while stop > self._first + len(self._data):
            end = self._first + len(self._data)
            rest = self._data[start - self._first :] if start < end else memoryview(b"")
            if start > end + len(self._data):
                self._coming, end = self._blocks(start), start
            first, data = next(self._coming)
            assert first == end
            self._first, self._data = (first - len(rest), memoryview(bytes(rest) + data)) if rest else (first, data)
        return self._data[start - self._first : stop - self._first]

    def messages(self) -> Iterator[_MessageOffsets | None]:
        """Yield each message, and None at the end of each stream."""
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
            message = _parse_message(self.at(at, at + first + length), at, self.nbytes)
            yield message
            at = message.stop


def layout_of(
    nbytes: int,
    read: ReadRanges,
    blocks: Callable[[int], Iterator[tuple[int, memoryview]]],
    first_read: FooterRead | None = None,
) -> bytes:
    """Read the layout of an object, packed for `unpack_layout`.

    The object has `nbytes` bytes. For a file, `read` returns the footer and the metadata of all messages. A stream has
    no table of contents: it is scanned through `blocks(start)`, which yields offsets and bytes from `start` on.
    DamagedError gives the reason if there is no layout.
    """
    try:
        if nbytes < 8:
            raise DamagedError(f"it has {nbytes} bytes")
        first_read = FooterRead(GLANCE_NBYTES) if first_read is None else first_read
        head, tail = read([(0, len(MAGIC)), (max(0, nbytes - first_read.nbytes), nbytes)])
        if bytes(head) != MAGIC:
            return _of_stream(_Forward(nbytes, blocks))
        packed = _of_file(nbytes, read, tail)
        first_read.learn(int.from_bytes(tail[-_TAIL_NBYTES : -len(MAGIC)], "little") + _TAIL_NBYTES)
        return packed
    except struct.error as error:
        raise DamagedError(f"its metadata are damaged: {error}") from error


def _of_file(nbytes: int, read: ReadRanges, tail: memoryview) -> bytes:
    footer = _read_footer(nbytes, read, tail)
    dictionaries = _read_listed(footer, 2, DICTIONARY, nbytes, read)
    batches = _read_listed(footer, 3, BATCH, nbytes, read)
    return _pack(footer.buffer, footer.required(1).at, True, dictionaries, batches)


def check_single_file(nbytes: int, read: ReadRanges) -> None:
    """Raise DamagedError unless there is exactly one file with a footer."""
    try:
        _read_footer(nbytes, read, read([(max(0, nbytes - GLANCE_NBYTES), nbytes)])[0])
    except struct.error as error:
        raise DamagedError(f"its metadata are damaged: {error}") from error


def _read_footer(nbytes: int, read: ReadRanges, tail: memoryview) -> FlatTable:
    length = int.from_bytes(tail[-_TAIL_NBYTES : -len(MAGIC)], "little")
    stop = nbytes - _TAIL_NBYTES
    if bytes(tail[-len(MAGIC) :]) != MAGIC or not 0 < length <= stop:
        raise DamagedError("there is no footer at its end")
    in_tail = length + _TAIL_NBYTES <= len(tail)
    data = tail[-length - _TAIL_NBYTES : -_TAIL_NBYTES] if in_tail else read([(stop - length, stop)])[0]
    footer = FlatTable.root(memoryview(bytes(data)))
    _check_end(footer, stop - length, read)
    return footer


def _check_end(footer: FlatTable, footer_at: int, read: ReadRanges) -> None:
    """Refuse messages that the footer does not list."""
    blocks = [block for field in (2, 3) for block in _blocks(footer, field)]
    end = max((start + length + body for start, length, body in blocks), default=0)
    if not blocks:
        prefix = read([(8, min(16, footer_at))])[0] if footer_at > 8 else memoryview(b"")
        first = _prefix_nbytes(prefix)
        end = 8 + first + int.from_bytes(prefix[first - 4 : first], "little")
    # Offsets of the second of two files then count from the start of the first, so more messages or a footer follow.
    rest = bytes(read([(end, min(end + _END_NBYTES, footer_at))])[0]) if 0 <= end < footer_at else b""
    if rest.removeprefix(_CONTINUATION).strip(b"\0"):
        raise DamagedError(
            f"its footer lists nothing after byte {end}, where more data follows: if it consists of several files,"
            " store each of them separately"
        )


def _blocks(footer: FlatTable, field: int) -> list[tuple[int, int, int]]:
    """Listed messages: (start, length of the metadata, length of the body)."""
    at, count = footer.vector(field, BLOCK.size)
    return list(BLOCK.iter_unpack(footer.buffer[at : at + count * BLOCK.size]))


def _read_listed(footer: FlatTable, field: int, kind: int, nbytes: int, read: ReadRanges) -> list[_MessageOffsets]:
    """Read the messages that a footer lists."""
    blocks = _blocks(footer, field)
    for start, length, body in blocks:
        if not 0 <= start < start + length <= start + length + body <= nbytes:
            raise DamagedError(f"its footer refers to bytes from {start} on that do not exist")
    spans = [(start, start + length) for start, length, _ in blocks]
    messages = [_parse_message(data, start, nbytes) for (start, _), data in zip(spans, read(spans), strict=True)]
    for message, (start, _, body) in zip(messages, blocks, strict=True):
        if message.kind != kind or message.stop - message.body != body:
            raise DamagedError(f"its footer does not fit the message at byte {start}")
    return messages


def _of_stream(forward: _Forward) -> bytes:
    messages = forward.messages()
    first = next(messages, None)
    if first is None or first.kind != SCHEMA:
        raise DamagedError("it does not begin with a schema")
    data: dict[int, list[_MessageOffsets]] = {DICTIONARY: [], BATCH: []}
    has_ended = False
    for message in messages:
        if message is None:
            has_ended = True
        elif message.kind == SCHEMA and has_ended:
            # Old and new writers write different prefixes and padding, but the same schema.
            if bytes(message.table.buffer).rstrip(b"\0") != bytes(first.table.buffer).rstrip(b"\0"):
                raise DamagedError(
                    f"streams follow each other in it, and the one from byte {message.start} on has another schema"
                )
            has_ended = False
        elif message.kind not in data or has_ended:
            raise DamagedError(f"a message of the unexpected kind {message.kind} is at byte {message.start}")
        else:
            data[message.kind].append(message)
    head = first.table
    return _pack(head.buffer, head.required(2).at, False, data[DICTIONARY], data[BATCH])


def _pack(
    head: memoryview, at: int, is_file: bool, dictionaries: list[_MessageOffsets], batches: list[_MessageOffsets]
) -> bytes:
    """Pack a layout, with the metadata of the batches at the end."""
    filled = [batch for batch in batches if batch.batch[3]]
    rows = [*(message.dictionary for message in dictionaries), *(message.batch for message in filled)]
    sizes = _PREFACE.pack(is_file, at, len(head), len(dictionaries), len(filled))
    numbers = np.array([number for row in rows for number in row], "<i8")
    return b"".join([sizes, head, numbers.tobytes(), *(message.metadata for message in filled)])


def unpack_layout(data: bytes | memoryview) -> Layout:
    """Restore the layout that `layout_of` packed."""
    is_file, at, size, dictionaries, batches = _PREFACE.unpack_from(data)
    first = _PREFACE.size + size
    second = 5 * dictionaries
    numbers = np.frombuffer(bytes(data[first : first + 8 * (second + 4 * batches)]), "<i8")
    head = bytes(data[_PREFACE.size : first])
    return Layout(head, at, bool(is_file), numbers[:second].reshape(-1, 5), numbers[second:].reshape(-1, 4))


class BatchMetadata:
    """The metadata of a record batch, whose buffers can be replaced."""

    def __init__(self, metadata: bytes | memoryview) -> None:
        self._metadata = memoryview(metadata)
        message = message_table(self._metadata)
        batch = message.required(2)
        self._message, self._batch = message, batch
        self._prefix_nbytes = len(metadata) - len(message.buffer)
        self._buffers_at, count = batch.vector(2, 16)
        self.buffers = np.frombuffer(message.buffer, "<i8", 2 * count, self._buffers_at).reshape(-1, 2)
        """Rows of (offset, length)."""

    @property
    def nodes(self) -> NDArray[np.int64]:
        """Rows of (length, number of nulls), one for each column and member."""
        at, count = self._batch.vector(1, 16)
        return np.frombuffer(self._message.buffer, "<i8", 2 * count, at).reshape(-1, 2)

    @property
    def is_plain(self) -> bool:
        """True if uncompressed, since Arrow 1.0, and in one piece."""
        length = int.from_bytes(self._metadata[self._prefix_nbytes - 4 : self._prefix_nbytes], "little")
        version = self._message.scalar(0, INT16)
        return length == len(self._message.buffer) and version == V5 and self._batch.place(3) is None

    def pattern(self, nodes: NDArray[np.bool_]) -> tuple[bytes, ...]:
        """Key of all properties that determine these columns' buffers."""
        # Without rows or nulls, a column has fewer buffers; each column of views has its own number of buffers.
        pairs = self.nodes
        count = len(pairs)
        zeros = (pairs[nodes] if count == len(nodes) else pairs) == 0
        at, views = self._batch.vector(4, 8)
        counts = struct.pack("<3q", self._message.scalar(0, INT16), count, len(self.buffers))
        return counts, zeros.tobytes(), bytes(self._message.buffer[at : at + 8 * views])

    def with_buffers(self, buffers: NDArray[np.int64], body_nbytes: int) -> bytes:
        """The metadata with other buffers and another size of the body."""
        data = bytearray(self._metadata)
        first = self._prefix_nbytes + self._buffers_at
        data[first : first + buffers.nbytes] = buffers.astype("<i8").tobytes()
        at = self._message.place(3)
        if at is not None:
            INT64.pack_into(data, self._prefix_nbytes + at, body_nbytes)
        return bytes(data)


def dictionary_ids(field: FlatTable) -> Iterator[int]:
    """Ids of the dictionaries of a field and its children."""
    if (encoding := field.table(4)) is not None:
        yield encoding.scalar(0, INT64)
    for child in field.tables(5):
        yield from dictionary_ids(child)


def count_nodes(field: FlatTable) -> int:
    """Number of field nodes of a column, without dictionaries."""
    return 1 if field.table(4) is not None else 1 + sum(map(count_nodes, field.tables(5)))
