"""Changes of files that know their structure: JSON, compressed content, footers, headers and numbers.

Most bytes of a file are data, so random bytes seldom reach the code behind a checksum, a codec or a parser. Each
function returns a changed file that still has the form of its format, or None for a file of another format.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import cramjam
import google_crc32c
from orc_parts import ORCParts

Change = Callable[[bytes, random.Random], bytes]

CONTENT_NBYTES = 1 << 20
"""Larger contents are not unpacked."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64, 10**30, -(1 << 63), 0.5, 1e300),
    *(float("nan"), float("inf"), "", "x", "1", "é", "../up", "/", "\0", "\ud800", "int64", "|O", "<f8", "struct"),
    *([], {}, [[]], [None], [0], [-1], [1 << 62], {"x": 1}, [{}], "a" * 5000),
)


def restructured(name: str, data: bytes, change: Change, rng: random.Random) -> bytes:
    """The file with a change inside its structure; a plain change if it has none that is known."""
    known = [each for each in FORMS if each.fits(name, data)]
    if not known:
        return change(data, rng)
    try:
        return rng.choice(known).changed(data, change, rng)
    except _UNFIT:
        return change(data, rng)


_UNFIT = (
    *(ValueError, LookupError, EOFError, OSError, TypeError, struct.error, zlib.error, lzma.LZMAError, RecursionError),
    *(cramjam.DecompressionError, zipfile.BadZipFile, NotImplementedError, OverflowError),
)
"""Errors for a file that only looks like one of a format."""


# Values of JSON


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Containers and keys of all values in a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(pairs):
        yield value, key
        yield from _nodes(each)


def changed_value(value: Any, change: Change, rng: random.Random) -> Any:
    """A parsed JSON value with another one somewhere in it."""
    nodes = list(_nodes(value))
    if not nodes or rng.random() < 0.02:
        return rng.choice(VALUES)
    holder, key = rng.choice(nodes)
    old = holder[key]
    act = rng.randrange(8)
    if act == 0:
        del holder[key]
    elif act == 1 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), rng.choice([old, rng.choice(VALUES)]))
    elif act == 2:
        other, name = rng.choice(nodes)
        holder[key] = other[name] if other is not old else None
    elif act == 3:
        holder[key] = [old] if rng.random() < 0.5 else {"x": old}
    elif isinstance(old, str) and old[:1] in ("{", "[") and act < 7:
        holder[key] = changed_json(old.encode(), change, rng).decode(errors="replace")
    elif isinstance(old, str) and act < 7:
        holder[key] = change(old.encode("utf-8", "surrogatepass"), rng).decode(errors="replace")
    elif isinstance(old, (int, float)) and act < 7:
        holder[key] = near(old, rng)
    else:
        holder[key] = rng.choice(VALUES)
    return value


def near(number: Any, rng: random.Random) -> Any:
    """A number near a number, or related to it."""
    return rng.choice(
        [number + 1, number - 1, number + rng.randrange(-20, 20), -number, number * 2, number * 1000, number // 2]
    )


def changed_json(data: bytes, change: Change, rng: random.Random) -> bytes:
    return json.dumps(changed_value(json.loads(data), change, rng)).encode("utf-8", "surrogatepass")


def _json_lines(data: bytes, change: Change, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.choice([number for number, line in enumerate(lines) if line.strip()])
    lines[at] = changed_json(lines[at], change, rng)
    return b"\n".join(lines)


# Numbers written in digits


_DIGITS = re.compile(rb"-?\d+")


def _digits(data: bytes, _: Change, rng: random.Random) -> bytes:
    """Another number of as many digits, or of any."""
    found = list(_DIGITS.finditer(data, 0, CONTENT_NBYTES))
    match = rng.choice(found)
    number = near(int(match[0][:30]), rng)
    text = rng.choice([str(number), str(rng.choice([0, 1 << 31, 1 << 63, 10**12])), "-1", ""]).encode()
    if rng.random() < 0.5:
        text = text.rjust(len(match[0]), b"0")[-len(match[0]) :]
    return data[: match.start()] + text + data[match.end() :]


# Compressed content


def _compressed(unpack: Callable[[bytes], Any], pack: Callable[[bytes], Any]) -> Callable[..., bytes]:
    def changed(data: bytes, change: Change, rng: random.Random) -> bytes:
        return bytes(pack(change(bytes(unpack(data))[:CONTENT_NBYTES], rng)))

    return changed


def _zip(data: bytes, change: Change, rng: random.Random) -> bytes:
    """One member of an archive changed by its own structure."""
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        members = [(info, source.read(info)) for info in source.infolist()]
    chosen, out = rng.randrange(len(members)), io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for number, (info, content) in enumerate(members):
            if number == chosen:
                content = restructured(info.filename, content, change, rng)
            target.writestr(info, content, info.compress_type)
    return out.getvalue()


# Footers


class _Number(NamedTuple):
    start: int
    stop: int


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _varint_at(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("no varint")


def _other_varint(value: int, rng: random.Random) -> bytes:
    others = [value + 1, value + 2, max(0, value - 1), max(0, value - 2), value * 2, value // 2, rng.randrange(64)]
    return _varint(rng.choice([*others, *others, 0, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1]))


class _Thrift:
    """The numbers and lengths of a struct in Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._data, self.numbers = data, list[_Number]()
        self._struct(0)

    def _number(self, at: int) -> tuple[int, int]:
        value, stop = _varint_at(self._data, at)
        self.numbers.append(_Number(at, stop))
        return value, stop

    def _struct(self, at: int) -> int:
        while head := self._data[at]:
            at += 1
            if not head >> 4:
                at = _varint_at(self._data, at)[1]
            at = self._value(head & 15, at)
        return at + 1

    def _value(self, kind: int, at: int) -> int:
        """The end of a value; those of kind 1 and 2 are in the header of their field."""
        if kind in _THRIFT_NBYTES:
            return at + _THRIFT_NBYTES[kind]
        if kind in (4, 5, 6):
            return self._number(at)[1]
        if kind == 8:
            nbytes, at = self._number(at)
            return at + nbytes
        if kind == 12:
            return self._struct(at)
        if kind in (9, 10):
            return self._list(at)
        raise ValueError("an unknown type")

    def _list(self, at: int) -> int:
        count, kind, at = self._data[at] >> 4, self._data[at] & 15, at + 1
        if count == 15:
            count, at = self._number(at)
        for _ in range(count):
            at = self._value(kind, at) if kind > 2 else at + 1
        return at


_THRIFT_NBYTES = {1: 0, 2: 0, 3: 1, 7: 8}


def _parquet(data: bytes, change: Change, rng: random.Random) -> bytes:
    """Another number in the footer, or in the header of a page."""
    nbytes = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - nbytes], data[-8 - nbytes : -8]
    if rng.random() < 0.3:
        start = rng.choice(_page_starts(body))
        numbers = _Thrift(body[start:]).numbers
        at = rng.choice(numbers)
        value = _varint_at(body, start + at.start)[0]
        body = body[: start + at.start] + _other_varint(value, rng) + body[start + at.stop :]
        return body + footer + data[-8:]
    if rng.random() < 0.3:
        footer = change(footer, rng)
    else:
        at = rng.choice(_Thrift(footer).numbers)
        footer = footer[: at.start] + _other_varint(_varint_at(footer, at.start)[0], rng) + footer[at.stop :]
    return body + footer + len(footer).to_bytes(4, "little") + data[-4:]


def _page_starts(body: bytes) -> list[int]:
    """Places that look like the header of a page: the field of its type, then those of its sizes."""
    return [match.start() for match in re.finditer(rb"\x15[\x00\x04\x06]\x15", body)]


def _protobuf_numbers(data: bytes, start: int, stop: int) -> list[_Number]:
    """Numbers and lengths of a message, and of what may be messages in it; none if it is no message."""
    found, at = list[_Number](), start
    while at < stop:
        key, at = _varint_at(data, at)
        if key & 7 in _PROTOBUF_NBYTES:
            at += _PROTOBUF_NBYTES[key & 7]
            continue
        if key & 7 not in (0, 2) or not key >> 3:
            return []
        number, after = _varint_at(data, at)
        found.append(_Number(at, after))
        at = after if key & 7 == 0 else after + number
        if key & 7 and at <= stop:
            with suppress(IndexError, ValueError):
                found += _protobuf_numbers(data, after, at)
    return found if at == stop else []


_PROTOBUF_NBYTES = {1: 8, 5: 4}


def _other_message(data: bytes, change: Change, rng: random.Random) -> bytes:
    numbers = _protobuf_numbers(data, 0, len(data))
    if not numbers or rng.random() < 0.3:
        return change(data, rng)
    at = rng.choice(numbers)
    return data[: at.start] + _other_varint(_varint_at(data, at.start)[0], rng) + data[at.stop :]


def _tfrecord(data: bytes, change: Change, rng: random.Random) -> bytes:
    """One record changed, with its length; `repairs` sets the checksums."""
    starts, at = [], 0
    while at < len(data):
        starts.append(at)
        at += 16 + int.from_bytes(data[at : at + 8], "little")
    start = rng.choice(starts)
    stop = start + 12 + int.from_bytes(data[start : start + 8], "little")
    record = _other_message(data[start + 12 : stop], change, rng)
    return data[:start] + len(record).to_bytes(8, "little") + bytes(4) + record + bytes(4) + data[stop + 4 :]


def _orc_unpacked(data: bytes) -> bytes:
    parts, at = [], 0
    while at < len(data):
        head = int.from_bytes(data[at : at + 3], "little")
        piece = data[at + 3 : at + 3 + (head >> 1)]
        parts.append(piece if head & 1 else zlib.decompress(piece, -15))
        at += 3 + (head >> 1)
    return b"".join(parts)


def _orc_packed(data: bytes) -> bytes:
    return (len(data) << 1 | 1).to_bytes(3, "little") + data


def _orc(data: bytes, change: Change, rng: random.Random) -> bytes:
    """A stream, the footer or the postscript changed, with sizes that fit."""
    if rng.random() < 0.5:
        parts = ORCParts(data)
        stream = rng.choice([each for stripe in parts.stripes for each in stripe.streams])
        stream.content = change(stream.content, rng)
        return parts.joined()
    tail = data[-1]
    script, rest = data[-1 - tail : -1], data[: -1 - tail]
    if rng.random() < 0.2:
        script = _other_message(script, change, rng)
        return rest + script + bytes([len(script) & 0xFF])
    nbytes, after = _varint_at(script, 1)
    packed = _varint_at(script, after + 1)[0] != 0
    body, footer = rest[:-nbytes], rest[-nbytes:]
    footer = _other_message(_orc_unpacked(footer) if packed else footer, change, rng)
    footer = _orc_packed(footer) if packed else footer
    script = script[:1] + _varint(len(footer)) + script[after:]
    return body + footer + script + bytes([len(script)])


# Avro


def _zigzag_at(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint_at(data, at)
    return value >> 1 ^ -(value & 1), at


def _avro_bytes(data: bytes) -> bytes:
    return _varint(2 * len(data)) + data


def _avro(data: bytes, change: Change, rng: random.Random) -> bytes:
    """The schema, or the content of a block, changed, with the lengths that fit."""
    count, at = _zigzag_at(data, 4)
    entries = {}
    for _ in range(count):
        nbytes, at = _zigzag_at(data, at)
        key, at = data[at : at + nbytes], at + nbytes
        nbytes, at = _zigzag_at(data, at)
        entries[key], at = data[at : at + nbytes], at + nbytes
    at += 1
    sync, at = data[at : at + 16], at + 16
    codec, blocks = entries.get(b"avro.codec", b"null"), []
    while at < len(data):
        rows, at = _zigzag_at(data, at)
        nbytes, at = _zigzag_at(data, at)
        blocks.append((rows, data[at : at + nbytes]))
        at += nbytes + 16
    if rng.random() < 0.5:
        key = rng.choice(list(entries))
        entries[key] = restructured("x.json" if key == b"avro.schema" else "", entries[key], change, rng)
    elif blocks:
        at = rng.randrange(len(blocks))
        rows, content = blocks[at]
        content = zlib.decompress(content, -15) if codec == b"deflate" else content
        content = change(content, rng) if rng.random() < 0.8 else content
        rows = rows if rng.random() < 0.8 else near(rows, rng)
        packer = zlib.compressobj(wbits=-15)
        blocks[at] = rows, packer.compress(content) + packer.flush() if codec == b"deflate" else content
    head = [_varint(2 * len(entries)), *(_avro_bytes(k) + _avro_bytes(v) for k, v in entries.items()), b"\0"]
    body = [_varint(rows << 1 if rows >= 0 else ~rows << 1 | 1) + _avro_bytes(c) + sync for rows, c in blocks]
    return data[:4] + b"".join([*head, sync, *body])


# Arrays


def _npy(data: bytes, change: Change, rng: random.Random) -> bytes:
    """Another text in the header, with its length."""
    size = 2 if data[6] == 1 else 4
    stop = 8 + size + int.from_bytes(data[8 : 8 + size], "little")
    header = data[8 + size : stop].rstrip()
    header = _digits(header, change, rng) if rng.random() < 0.6 else change(header, rng)
    header += b" " * (-(len(header) + 9 + size) % 64) + b"\n"
    return data[:8] + len(header).to_bytes(size, "little", signed=False) + header + data[stop:]


def _feedline(data: bytes, change: Change, rng: random.Random) -> bytes:
    """The table of an index changed; `repairs` sets the checksums."""
    nbytes = int.from_bytes(data[20:24], "little")
    table = changed_json(data[28 : 28 + nbytes], change, rng)
    head = data[:20] + len(table).to_bytes(4, "little") + bytes(4) + table
    arrays = data[-(-(28 + nbytes) // 64) * 64 :]
    return head.ljust(-(-len(head) // 64) * 64, b"\0") + arrays


def _sharded(data: bytes, change: Change, rng: random.Random) -> bytes:
    """The index at the end of a shard of Zarr changed, with its checksum."""
    for count in range(1, 65):
        index = data[-16 * count - 4 : -4]
        if len(index) == 16 * count and google_crc32c.value(index) == int.from_bytes(data[-4:], "little"):
            at, words = rng.randrange(2 * count), list(struct.unpack(f"<{2 * count}Q", index))
            words[at] = rng.choice([near(words[at], rng), rng.choice(words), 0, len(data), (1 << 64) - 1]) % (1 << 64)
            index = struct.pack(f"<{2 * count}Q", *words)
            return data[: -16 * count - 4] + index + google_crc32c.value(index).to_bytes(4, "little")
    raise ValueError("no shard")


class Form(NamedTuple):
    """A structure: the beginning of its files, the ends of their names, and a change."""

    changed: Callable[[bytes, Change, random.Random], bytes]
    magic: tuple[bytes, ...] = (b"",)
    suffixes: tuple[str, ...] = ("",)

    def fits(self, name: str, data: bytes) -> bool:
        return data.startswith(self.magic) and name.endswith(self.suffixes)


_TEXTS = (".csv", ".tsv", ".xsv", ".tar", ".json", ".cls", ".txt", ".text", ".zarray", ".zgroup", ".zattrs")

FORMS = (
    Form(changed_json, (b"{", b"["), (".json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")),
    Form(_json_lines, (b"{", b"["), ("jsonl", "ndjson", ".json")),
    Form(_digits, suffixes=_TEXTS),
    Form(_compressed(gzip.decompress, lambda data: gzip.compress(data, 1)), (b"\x1f\x8b",)),
    Form(_compressed(cramjam.zstd.decompress, cramjam.zstd.compress), (b"\x28\xb5\x2f\xfd",)),
    Form(_compressed(bz2.decompress, bz2.compress), (b"BZh",)),
    Form(_compressed(lzma.decompress, lzma.compress), (b"\xfd7zXZ",)),
    Form(_zip, (b"PK\3\4",)),
    Form(_parquet, (b"PAR1",)),
    Form(_orc, (b"ORC",)),
    Form(_avro, (b"Obj\1",)),
    Form(_npy, (b"\x93NUMPY",)),
    Form(_feedline, (b"feedline arrays\n",)),
    Form(_tfrecord, suffixes=(".tfrecord",)),
    Form(_sharded, suffixes=tuple("0123456789")),
)
