"""Parser and decoders of `tf.train.Example` messages.

The parser reads the few protobuf messages that an example consists of, without protobuf. Features become tensors of the
requested dtype and shape, or decoded bytes.

Wire format: https://protobuf.dev/programming-guides/encoding/. Messages: tensorflow/core/example/feature.proto.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from feedline.core.tensors import torch_dtype
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.base import Decodes, Field
from feedline.datasets.decoding import DECODERS, Decode, Decoding, SampleTransform
from feedline.errors import ArgumentError, SampleError

Value = list[bytes] | NDArray[np.float32] | NDArray[np.int64]


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


_SHORT = 16
"""Size in bytes up to which varints are decoded faster in a loop than with NumPy."""


def parse_example(data: bytes, wanted: Container[str] | None = None) -> dict[str, Value]:
    """Features by name: lists of bytes, float32 or int64 arrays.

    Only those in `wanted`, if it is given. A feature without any value is an empty list of bytes; of a repeated name,
    the last one counts. ValueError for invalid bytes.
    """
    parsed_features: dict[str, Value] = {}
    for number, features in _messages(data):
        if number == 1:
            for kind, entry in _messages(features):
                if kind == 1:
                    name, feature = _entry(entry)
                    if wanted is None or name in wanted:
                        parsed_features[name] = _feature(feature)
    return parsed_features


def _entry(data: bytes) -> tuple[str, bytes]:
    """Key and value of a map entry; absent ones are empty."""
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
    """Values of a FloatList: packed, unpacked, or both."""
    pieces = [bytes(value) for number, _, value in _fields(data) if number == 1 and not isinstance(value, int)]
    joined = b"".join(pieces)
    if len(joined) % 4:
        raise ValueError(f"a list of floats has {len(joined)} bytes, which is not a multiple of 4")
    return np.frombuffer(joined, "<f4").astype(np.float32)


def _integers(data: bytes) -> NDArray[np.int64]:
    """Values of an Int64List: packed, unpacked, or both."""
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
        raise ValueError("a list of integers ends within a varint")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("a varint has more than ten bytes")
    shifts = (np.arange(len(octets)) - np.repeat(starts, lengths)).astype(np.uint64) * np.uint64(7)
    return np.bitwise_or.reduceat((octets & np.uint8(0x7F)).astype(np.uint64) << shifts, starts)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and value of each length-delimited field.

    Fields of other wire types are skipped, as the wire format requires.
    """
    for number, kind, value in _fields(data):
        if kind == _BYTES:
            assert isinstance(value, bytes)
            yield number, value


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of each field.

    Varints are int, others bytes.
    """
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
            raise ValueError(f"field {number} at byte {at} claims {length} bytes, but {stop - at} are left")
        yield number, kind, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
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


Feature = Decode | DTypeLike | torch.dtype | tuple[DTypeLike | torch.dtype, tuple[int, ...]]


Where = Callable[[], str]


class EveryFeature:
    """Decodes a record to all of its features, as they are stored.

    Numbers become 1-D tensors, bytes become lists.
    """

    step = SampleTransform(None)
    batchable = draws = False

    def __call__(self, source: memoryview, row: int | None, where: Where) -> dict[str, Any]:  # noqa: ARG002 - as others
        """All features of a record."""
        features = _parse(source, None, where)
        # Sorted, because the order of protobuf map entries is arbitrary.
        return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in sorted(features.items())}


class ChosenFeatures:
    """Decodes the requested features, each to the requested type."""

    def __init__(self, features: Mapping[str, Feature], transforms: Mapping[str, Transform]) -> None:
        if not isinstance(features, Mapping):
            raise ArgumentError(
                f"columns={features!r}: pass a dict from the name of each feature to its type, such as"
                " {'label': 'int64'}"
            )
        self._decodings = {
            name: _build_decoding(name, feature, transforms.get(name)) for name, feature in features.items()
        }

    @property
    def decodings(self) -> Collection[Decodes]:
        """Decodings of the features."""
        return self._decodings.values()

    def fields(self, record: memoryview, where: Where) -> dict[str, Field]:
        """Requested features of a record; SampleError names a missing one."""
        values = _parse(record, self._decodings, where)
        if len(values) < len(self._decodings):
            missing = next(name for name in self._decodings if name not in values)
            there = ", ".join(sorted(_parse(record, None, where))) or "none"
            raise SampleError(f"{where()} has no feature {missing!r}; it has {there}")
        return {name: _field(name, values[name], decoding, where) for name, decoding in self._decodings.items()}


def _field(name: str, value: Value, decoding: Decodes, where: Where) -> Field:
    def describe() -> str:
        return f"feature {name!r} of {where()}"

    if isinstance(decoding, _Numbers):
        return Field(decoding, value, describe)
    if isinstance(value, np.ndarray) or len(value) != 1:
        raise SampleError(f"{describe()} holds {_describe(value)} instead of one bytes value")
    return Field(decoding, value[0], describe)


def _parse(record: memoryview, wanted: Mapping[str, Any] | None, where: Where) -> dict[str, Value]:
    try:
        return parse_example(bytes(record), wanted)
    except ValueError as error:  # UnicodeDecodeError is one
        raise SampleError(
            f"{where()} is not a tf.train.Example ({error}); pass decode='bytes' for other records"
        ) from error


def _build_decoding(name: str, feature: Feature, transform: Transform | None) -> Decodes:
    if (isinstance(feature, str) and feature in DECODERS) or (callable(feature) and not isinstance(feature, type)):
        return Decoding(feature, transform)
    dtype, shape = feature if isinstance(feature, tuple) and len(feature) == 2 else (feature, ())
    try:
        numbers = torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    except TypeError:
        numbers = None
    if numbers is None or torch_dtype(numbers) is None or not _is_shape(shape):
        raise ArgumentError(
            f"columns[{name!r}]={feature!r} is neither a dtype, nor (dtype, shape) with at most one -1, such as"
            f" ('int64', (3,)), nor a function, nor one of {', '.join(DECODERS)}"
        )
    return _Numbers(numbers, tuple(shape), SampleTransform(transform))


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, Sequence) or not all(isinstance(side, int) and side >= -1 for side in shape):
        return False
    return shape.count(-1) <= 1


@dataclass(frozen=True)
class _Numbers:
    """Decodes a feature to a tensor.

    The numbers are in a list, or raw (little endian) in a single bytes value.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    step: SampleTransform
    batchable = draws = False

    def __call__(self, source: Value, row: int | None, where: Where) -> Any:
        numbers = source if isinstance(source, np.ndarray) else self._raw_numbers(source, where)
        if not self._fits(len(numbers)):
            raise SampleError(
                f"{where()} holds {_describe(source)}, which do not make {self.dtype} of shape {self.shape}"
            )
        if numbers.dtype.kind == "f" and self.dtype.kind in "iub":
            _check_integers(numbers, self.dtype, where)
        converted = numbers.astype(self.dtype)
        if numbers.dtype.kind == "i" and (converted != numbers).any():
            raise SampleError(f"{where()} holds numbers that {self.dtype} cannot represent; request a wider dtype")
        return self.step(torch.from_numpy(converted.reshape(self.shape)), row)

    def _raw_numbers(self, value: list[bytes], where: Where) -> NDArray[Any]:
        joined = value[0] if len(value) == 1 else b""
        if not joined or len(joined) % self.dtype.itemsize:
            raise SampleError(
                f"{where()} holds {_describe(value)}, which do not make {self.dtype} of shape {self.shape}"
            )
        return np.frombuffer(joined, self.dtype.newbyteorder("<"))

    def _fits(self, count: int) -> bool:
        known = prod(side for side in self.shape if side != -1)
        return count % known == 0 if -1 in self.shape and known else count == known


def _check_integers(numbers: NDArray[Any], dtype: np.dtype[Any], where: Where) -> None:
    """SampleError unless all floats are integers in the range of `dtype`."""
    whole = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(whole).min, np.iinfo(whole).max)
    # Compared with the maximum plus one, a power of two, which floats hold exactly; the maximum itself may be rounded.
    fit = (numbers >= least) & (numbers < float(most + 1)) & (numbers == np.trunc(numbers))
    if not fit.all():
        raise SampleError(
            f"{where()} holds {numbers[~fit][0]:g}, which {dtype} cannot represent; request a floating-point dtype"
        )


def _describe(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return f"{len(value)} x {value.dtype}"
    return f"{len(value)} bytes values" if len(value) != 1 else f"{len(value[0])} bytes"
