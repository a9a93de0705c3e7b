"""Right checksums for mutated files, so that damage reaches the code after their check."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from math import prod

import google_crc32c

from feedline.datasets.shards.tfrecord import HEAD_NBYTES, TAIL_NBYTES

_TAR_BLOCK = 512
_ZIP_ENTRY = b"PK\x01\x02"
_PNG = b"\x89PNG\r\n\x1a\n"
_GZIP = b"\x1f\x8b"
_PIECE = b"feedlin1"
_ARRAYS = b"feedline arrays\n"


def repaired(name: str, data: bytes) -> bytes:
    """The file with checksums that fit its contents; most formats have none."""
    if data[-20:-12] == _PIECE:
        return _piece(data)
    if name.endswith(".tfrecord") and not data.startswith(_GZIP):
        return _tfrecord(data)
    if name.endswith(".tar"):
        return _tar(data)
    for magic, repair in _REPAIRS.items():
        if data.startswith(magic):
            return repair(data)
    return data


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _tfrecord(data: bytes) -> bytes:
    """Set the checksums of all records that the lengths lead to."""
    parts, at = list[bytes](), 0
    while at + HEAD_NBYTES + TAIL_NBYTES <= len(data):
        head = data[at : at + 8]
        length = min(int.from_bytes(head, "little"), len(data) - at - HEAD_NBYTES - TAIL_NBYTES)
        record = data[at + HEAD_NBYTES : at + HEAD_NBYTES + length]
        parts += [head, _masked(head), record, _masked(record)]
        at += HEAD_NBYTES + length + TAIL_NBYTES
    return b"".join(parts) + data[at:]


def _tar(data: bytes) -> bytes:
    """Set the checksums of all blocks that look like headers."""
    changed = bytearray(data)
    for at in range(0, len(data) - _TAR_BLOCK + 1, _TAR_BLOCK):
        if data[at + 257 : at + 262] == b"ustar":
            changed[at + 148 : at + 156] = b" " * 8
            changed[at + 148 : at + 156] = b"%06o\0 " % sum(changed[at : at + _TAR_BLOCK])
    return bytes(changed)


def _zip(data: bytes) -> bytes:
    """Set the checksums of uncompressed members."""
    changed, at = bytearray(data), data.find(_ZIP_ENTRY)
    while 0 <= at <= len(data) - 46:
        method, nbytes, start = data[at + 10], *struct.unpack_from("<I14xI", data, at + 24)
        if not method and start <= len(data) - 30:
            contents = start + 30 + sum(struct.unpack_from("<HH", data, start + 26))
            changed[at + 16 : at + 20] = struct.pack("<I", zlib.crc32(data[contents : contents + nbytes]))
        at = data.find(_ZIP_ENTRY, at + 4)
    return bytes(changed)


def _png(data: bytes) -> bytes:
    """Set the checksums of all chunks that the lengths lead to."""
    changed, at = bytearray(data), len(_PNG)
    while at + 12 <= len(data):
        stop = at + 8 + int.from_bytes(data[at : at + 4])
        changed[stop : stop + 4] = zlib.crc32(data[at + 4 : stop]).to_bytes(4) if stop + 4 <= len(data) else b""
        at = stop + 4
    return bytes(changed)


def _reflected(at: int) -> int:
    """The entry of the table of Ogg's CRC for a byte."""
    value = at << 24
    for _ in range(8):
        value = (value << 1 ^ (0x04C11DB7 if value >> 31 else 0)) & 0xFFFFFFFF
    return value


_OGG_TABLE = [_reflected(at) for at in range(256)]


def _ogg(data: bytes) -> bytes:
    """Set the checksums of all pages."""
    starts = [at for at in range(len(data)) if data[at : at + 4] == b"OggS"]
    changed = bytearray(data)
    for start, stop in zip(starts, [*starts[1:], len(data)], strict=True):
        page, crc = data[start : start + 22] + bytes(4) + data[start + 26 : stop], 0
        for byte in page:
            crc = (crc << 8 & 0xFFFFFFFF) ^ _OGG_TABLE[crc >> 24 ^ byte]
        if stop - start >= 26:
            changed[start + 22 : start + 26] = crc.to_bytes(4, "little")
    return bytes(changed)


def _index(data: bytes) -> bytes:
    """Set the checksums of feedline's arrays and of their table."""
    stop = 28 + int.from_bytes(data[20:24], "little")
    text, arrays = data[28:stop], data[-(-stop // 64) * 64 :]
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        table = json.loads(text)
        for place in table["arrays"].values():
            nbytes = int(place[0][-1]) * prod(place[1])
            place[3] = zlib.crc32(arrays[place[2] : place[2] + nbytes])
        text = json.dumps(table, separators=(",", ":")).encode()
    head = data[:20] + struct.pack("<II", len(text), zlib.crc32(text)) + text
    return head.ljust(-(-len(head) // 64) * 64, b"\0") + arrays


def _piece(data: bytes) -> bytes:
    """Set length and checksum of a piece in a cache."""
    return data[:-12] + struct.pack("<QI", len(data) - 20, zlib.crc32(data[:-20]))


def _rotated(value: int, by: int) -> int:
    value &= 0xFFFFFFFF
    return value << by & 0xFFFFFFFF | value >> 32 - by


def _lookup3(data: bytes) -> int:
    """HDF5's checksum (Bob Jenkins, "lookup3.c", 2006)."""
    a = b = c = 0xDEADBEEF + len(data) & 0xFFFFFFFF
    words = struct.unpack(f"<{-(-len(data) // 12) * 3}I", data.ljust(-(-len(data) // 12) * 12, b"\0"))
    for at in range(0, len(words), 3):
        a, b, c = a + words[at], b + words[at + 1], c + words[at + 2]
        if at + 3 == len(words):
            break
        a, c = a - c ^ _rotated(c, 4), c + b
        b, a = b - a ^ _rotated(a, 6), a + c
        c, b = c - b ^ _rotated(b, 8), b + a
        a, c = a - c ^ _rotated(c, 16), c + b
        b, a = b - a ^ _rotated(a, 19), a + c
        c, b = c - b ^ _rotated(b, 4), b + a
    for by, name in zip((14, 11, 25, 16, 4, 14, 24), "cabcabc", strict=True):
        if name == "c":
            c = (c ^ b) - _rotated(b, by)
        elif name == "a":
            a = (a ^ c) - _rotated(c, by)
        else:
            b = (b ^ a) - _rotated(a, by)
        a, b, c = a & 0xFFFFFFFF, b & 0xFFFFFFFF, c & 0xFFFFFFFF
    return c


def _hdf5(data: bytes) -> bytes:
    """Set the checksums of the superblock and of all object headers of version 2."""
    changed = bytearray(data)
    spans = [(0, 44)] if data[8] in (2, 3) else []
    for match in re.finditer(b"OHDR\2", data):
        start = match.start()
        flags = data[start + 5] if start + 5 < len(data) else 0
        size = start + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        after = size + (1 << (flags & 3))
        spans.append((start, after + int.from_bytes(data[size:after], "little")))
    for start, stop in spans:
        if stop + 4 <= len(data):
            changed[stop : stop + 4] = _lookup3(data[start:stop]).to_bytes(4, "little")
    return bytes(changed)


_REPAIRS: dict[bytes, Callable[[bytes], bytes]] = {
    b"PK": _zip,
    b"\x89HDF\r\n\x1a\n": _hdf5,
    _PNG: _png,
    b"OggS": _ogg,
    _ARRAYS: _index,
}
"""Repairs by the beginning of a file."""
