"""Right checksums for mutated files, so that damage reaches the code after their check."""

from __future__ import annotations

import struct
import zlib

import google_crc32c

from feedline.datasets.shards.tfrecord import HEAD_NBYTES, TAIL_NBYTES

_TAR_BLOCK = 512
_ZIP_ENTRY = b"PK\x01\x02"


def repaired(name: str, data: bytes) -> bytes:
    """The file with checksums that fit its contents; most formats have none."""
    if name.endswith(".tfrecord"):
        return _tfrecord(data)
    if name.endswith(".tar"):
        return _tar(data)
    return _zip(data) if name.endswith(".npz") else data


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
