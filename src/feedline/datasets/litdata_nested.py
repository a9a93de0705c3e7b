"""LitData's compact form of nested lists and dicts: a tag, then what belongs to it; also plain JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from feedline.datasets.decoding import text_of

_Read = Callable[[memoryview, int], tuple[Any, int]]
_DEEPEST = 64
_FIRST_LETTER = 0x21
"""JSON begins with a letter or a bracket, the compact form with a small number."""


def nested(data: memoryview) -> Any:
    """The value in these bytes; ValueError, LookupError or struct.error where they are damaged."""
    if not data or data[0] >= _FIRST_LETTER:
        return json.loads(bytes(data))
    return _value(data, 0, 0)[0]


def _value(data: memoryview, at: int, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise ValueError(f"values are nested more than {_DEEPEST} deep")
    tag = data[at]
    if tag == 5:
        return _mapping(data, at + 1, depth)
    if tag in _LEAVES:
        return _LEAVES[tag](data, at + 1)
    raise ValueError(f"byte {at} has the tag {tag}, which is not known")


def _mapping(data: memoryview, at: int, depth: int) -> tuple[dict[str, Any], int]:
    count, at = _count(data, at)
    found = {}
    for _ in range(count):
        key, at = _text(data, at)
        found[key], at = _value(data, at, depth + 1)
    return found, at


def _records(data: memoryview, at: int) -> tuple[list[dict[str, Any]], int]:
    """Dicts of the same keys, which come once."""
    rows, at = _count(data, at)
    count, at = _count(data, at)
    keys = []
    for _ in range(count):
        key, at = _text(data, at)
        keys.append(key)
    found = []
    for _ in range(rows):
        row = {}
        for key in keys:
            row[key], at = _RECORD_LEAVES[data[at]](data, at + 1)
        found.append(row)
    return found, at


def _count(data: memoryview, at: int) -> tuple[int, int]:
    """A length, which cannot be more than what is left, whatever is counted."""
    (count,) = struct.unpack_from("<I", data, at)
    if count > len(data):
        raise ValueError(f"byte {at} counts {count} things in {len(data)} bytes")
    return count, at + 4


def _cut(data: memoryview, at: int, nbytes: int) -> tuple[memoryview, int]:
    if at + nbytes > len(data):
        raise ValueError(f"byte {at} begins {nbytes} bytes of the {len(data) - at} left")
    return data[at : at + nbytes], at + nbytes


def _text(data: memoryview, at: int) -> tuple[str, int]:
    count, at = _count(data, at)
    piece, at = _cut(data, at, count)
    return text_of(piece), at


def _json(data: memoryview, at: int) -> tuple[Any, int]:
    text, at = _text(data, at)
    return json.loads(text), at


def _texts(data: memoryview, at: int) -> tuple[list[str], int]:
    count, at = _count(data, at)
    found = []
    for _ in range(count):
        text, at = _text(data, at)
        found.append(text)
    return found, at


def _numbers(dtype: str) -> _Read:
    def read(data: memoryview, at: int) -> tuple[list[Any], int]:
        count, at = _count(data, at)
        piece, at = _cut(data, at, count * np.dtype(dtype).itemsize)
        return np.frombuffer(piece, dtype).tolist(), at

    return read


def _one(layout: str) -> _Read:
    def read(data: memoryview, at: int) -> tuple[Any, int]:
        return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)

    return read


def _none(_: memoryview, at: int) -> tuple[None, int]:
    return None, at


_LEAVES: dict[int, _Read] = {
    0: _json,
    1: _texts,
    2: _numbers("<i8"),
    3: _numbers("<f8"),
    4: _numbers("?"),
    6: _records,
    7: _text,
    8: _one("<q"),
    9: _one("<d"),
    10: _one("<?"),
    11: _none,
}
_RECORD_LEAVES: dict[int, _Read] = {0x10: _none, 0x11: _text, 0x12: _one("<q"), 0x13: _one("<d"), 0x14: _one("<?")}
