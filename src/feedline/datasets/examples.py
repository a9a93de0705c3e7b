"""`tf.train.Example` out of its bytes: a reader of the few protobuf messages that it is made of.

Wire format: https://protobuf.dev/programming-guides/encoding/. Messages: tensorflow/core/example/feature.proto.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Value = list[bytes] | NDArray[np.float32] | NDArray[np.int64]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SHORT = 16
"""Up to so many bytes, varints are read faster one by one than all at once."""


def parsed(data: bytes, wanted: Container[str] | None = None) -> dict[str, Value]:
    """The features by name, or the `wanted` ones: lists of bytes, float32 or int64 arrays.

    ValueError tells what is wrong with the bytes, whatever they are. A feature that holds nothing at all is an empty
    list of bytes; of a name that comes twice, the last counts.
    """
    found: dict[str, Value] = {}
    for number, features in _messages(data):
        if number == 1:
            for kind, entry in _messages(features):
                if kind == 1:
                    name, feature = _entry(entry)
                    if wanted is None or name in wanted:
                        found[name] = _feature(feature)
    return found


def _entry(data: bytes) -> tuple[str, bytes]:
    """Key and value of one entry of a map; what is absent is empty."""
    parts = dict(_messages(data))
    return parts.get(1, b"").decode("utf-8"), parts.get(2, b"")


def _feature(data: bytes) -> Value:
    value: Value = []
    for kind, values in _messages(data):
        if kind == 1:
            value = [each for number, each in _messages(values) if number == 1]
        elif kind == 2:
            value = _floats(values)
        elif kind == 3:
            value = _integers(values)
    return value


def _floats(data: bytes) -> NDArray[np.float32]:
    """Packed in one field, spread over many, or both."""
    pieces = [bytes(value) for number, _, value in _fields(data) if number == 1 and not isinstance(value, int)]
    joined = b"".join(pieces)
    if len(joined) % 4:
        raise ValueError(f"a list of floats has {len(joined)} bytes, which is no multiple of 4")
    return np.frombuffer(joined, "<f4").astype(np.float32)


def _integers(data: bytes) -> NDArray[np.int64]:
    """Packed in one field, spread over many, or both."""
    pieces = [
        np.array([value], np.uint64) if isinstance(value, int) else _varints(value)
        for number, _, value in _fields(data)
        if number == 1
    ]
    return (np.concatenate(pieces) if pieces else np.empty(0, np.uint64)).view(np.int64)


def _varints(data: bytes) -> NDArray[np.uint64]:
    if len(data) <= _SHORT:
        values, at = [], 0
        while at < len(data):
            value, at = _varint(data, at)
            values.append(value)
        return np.array(values, np.uint64)
    octets = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if not len(ends) or ends[-1] != len(octets) - 1:
        raise ValueError("a list of integers ends within a number")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("a number takes more than ten bytes")
    shifts = (np.arange(len(octets)) - np.repeat(starts, lengths)).astype(np.uint64) * np.uint64(7)
    return np.bitwise_or.reduceat((octets & np.uint8(0x7F)).astype(np.uint64) << shifts, starts)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields that have a length: messages, strings, bytes. Others are passed over, as the format wants."""
    for number, kind, value in _fields(data):
        if kind == _BYTES:
            assert isinstance(value, bytes)
            yield number, value


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """The number, wire type and value of each field: int for varints, else bytes."""
    at, stop = 0, len(data)
    while at < stop:
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, kind, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"field {number} at byte {at} has wire type {kind}, which no tf.train.Example has")
        if length > stop - at:
            raise ValueError(f"field {number} at byte {at} wants {length} bytes of the {stop - at} that are left")
        yield number, kind, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number below 2**64 and where the next thing begins."""
    value = shift = 0
    while at < len(data):
        octet = data[at]
        at += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift >= 70:
            raise ValueError(f"the number that ends at byte {at} takes more than ten bytes")
    raise ValueError("the message ends within a number")
