"""Small LMDB environments and TFRecord files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import google_crc32c
import lmdb


def filled(path: Path, entries: dict[bytes, bytes], **settings: Any) -> Path:
    database = settings.pop("database", None)
    with lmdb.open(str(path), map_size=1 << 24, max_dbs=2, **settings) as environment:
        held = environment.open_db(database) if database else None
        with environment.begin(write=True, db=held) as transaction:
            for key, value in entries.items():
                transaction.put(key, value)
    return path


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def records(*payloads: bytes) -> bytes:
    heads = [struct.pack("<Q", len(payload)) for payload in payloads]
    return b"".join(h + masked(h) + payload + masked(payload) for h, payload in zip(heads, payloads, strict=True))
