"""Reader of protobuf messages, for formats with few messages.

Wire format: https://protobuf.dev/programming-guides/encoding/. Damage is a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


_SHORT = 16
"""Most bytes of varints for which a loop decodes faster than NumPy."""


def varints(data: bytes) -> NDArray[np.uint64]:
    """The numbers of a packed field."""
    if len(data) <= _SHORT:
        values, at = [], 0
        while at < len(data):
            value, at = varint(data, at)
            values.append(value)
        return np.array(values, np.uint64)
    octets = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if not len(ends) or ends[-1] != len(octets) - 1:
        raise ValueError("a list of integers ends within a varint")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("a varint has more than ten bytes")
    shifts = (np.arange(len(octets)) - np.repeat(starts, lengths)).astype(np.uint64) * np.uint64(7)
    return np.bitwise_or.reduceat((octets & np.uint8(0x7F)).astype(np.uint64) << shifts, starts)


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and value of each length-delimited field.

    Fields of other wire types are skipped, as the wire format requires.
    """
    for number, kind, value in fields(data):
        if kind == _BYTES:
            assert isinstance(value, bytes)
            yield number, value


def fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of each field.

    Values of varints are int, all others bytes.
    """
    at, stop = 0, len(data)
    while at < stop:
        tag, at = varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = varint(data, at)
            yield number, kind, value
            continue
        if kind == _BYTES:
            length, at = varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"field {number} at byte {at} has wire type {kind}, which is not read")
        if length > stop - at:
            raise ValueError(f"field {number} at byte {at} claims {length} bytes, but {stop - at} are left")
        yield number, kind, data[at : at + length]
        at += length


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a varint (modulo 2**64); returns it and the next position."""
    value = shift = 0
    while at < len(data):
        octet = data[at]
        at += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift >= 70:
            raise ValueError(f"the varint that ends at byte {at} has more than ten bytes")
    raise ValueError("the message ends within a varint")


def by_number(data: bytes) -> dict[int, Any]:
    """The last value of each field."""
    return {number: value for number, _, value in fields(data)}
