"""What the features of an example become: tensors of the dtype and shape that were asked for, or decoded bytes.

`tf.train.Example` out of its bytes: a reader of the few protobuf messages that it is made of.

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


Feature = Decode | DTypeLike | torch.dtype | tuple[DTypeLike | torch.dtype, tuple[int, ...]]


Where = Callable[[], str]


class EveryFeature:
    """Decodes whole records to all features as they are: numbers as 1-D tensors, bytes as lists."""

    step = SampleTransform(None)
    batchable = draws = False

    def __call__(self, source: memoryview, row: int | None, where: Where) -> dict[str, Any]:  # noqa: ARG002 - as others
        """The sample in these bytes."""
        found = _parsed(source, None, where)
        # Sorted, because the format leaves the order to chance.
        return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in sorted(found.items())}


class ChosenFeatures:
    """The features that were asked for, each as what it should be."""

    def __init__(self, features: Mapping[str, Feature], transforms: Mapping[str, Transform]) -> None:
        if not isinstance(features, Mapping):
            raise ArgumentError(
                f"columns={features!r}: give a dict that says by name what each becomes, such as {{'label': 'int64'}}"
            )
        self._decodings = {name: _decoding(name, feature, transforms.get(name)) for name, feature in features.items()}

    @property
    def decodings(self) -> Collection[Decodes]:
        """How each feature is decoded."""
        return self._decodings.values()

    def fields(self, record: memoryview, where: Where) -> dict[str, Field]:
        """The features in these bytes."""
        found = _parsed(record, self._decodings, where)
        if len(found) < len(self._decodings):
            missing = next(name for name in self._decodings if name not in found)
            there = ", ".join(sorted(_parsed(record, None, where))) or "none"
            raise SampleError(f"{where()} has no feature {missing!r}; it has {there}")
        return {name: _field(name, found[name], decoding, where) for name, decoding in self._decodings.items()}


def _field(name: str, value: Value, decoding: Decodes, where: Where) -> Field:
    def named() -> str:
        return f"feature {name!r} of {where()}"

    if isinstance(decoding, _Numbers):
        return Field(decoding, value, named)
    if isinstance(value, np.ndarray) or len(value) != 1:
        raise SampleError(f"{named()} holds {_told(value)}, not one value of bytes")
    return Field(decoding, value[0], named)


def _parsed(record: memoryview, wanted: Mapping[str, Any] | None, where: Where) -> dict[str, Value]:
    try:
        return parsed(bytes(record), wanted)
    except ValueError as error:  # UnicodeDecodeError is one
        raise SampleError(
            f"{where()} is no tf.train.Example ({error}); give decode='bytes' for other records"
        ) from error


def _decoding(name: str, feature: Feature, transform: Transform | None) -> Decodes:
    if (isinstance(feature, str) and feature in DECODERS) or (callable(feature) and not isinstance(feature, type)):
        return Decoding(feature, transform)
    dtype, shape = feature if isinstance(feature, tuple) and len(feature) == 2 else (feature, ())
    try:
        numbers = torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    except TypeError:
        numbers = None
    if numbers is None or torch_dtype(numbers) is None or not _is_shape(shape):
        raise ArgumentError(
            f"columns[{name!r}]={feature!r} is no dtype, (dtype, shape) with at most one -1 such as ('int64', (3,)),"
            f" function, nor one of {', '.join(DECODERS)}"
        )
    return _Numbers(numbers, tuple(shape), SampleTransform(transform))


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, Sequence) or not all(isinstance(side, int) and side >= -1 for side in shape):
        return False
    return shape.count(-1) <= 1


@dataclass(frozen=True)
class _Numbers:
    """A tensor; its numbers are listed, or lie bare (little endian) in one value of bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    step: SampleTransform
    batchable = draws = False

    def __call__(self, source: Value, row: int | None, where: Where) -> Any:
        numbers = source if isinstance(source, np.ndarray) else self._bare(source, where)
        if not self._fits(len(numbers)):
            raise SampleError(f"{where()} holds {_told(source)}, which do not make {self.dtype} of shape {self.shape}")
        if numbers.dtype.kind == "f" and self.dtype.kind in "iub":
            _refuse_unfit(numbers, self.dtype, where)
        converted = numbers.astype(self.dtype)
        if numbers.dtype.kind == "i" and (converted != numbers).any():
            raise SampleError(f"{where()} holds numbers that {self.dtype} does not; ask for a wider dtype")
        return self.step(torch.from_numpy(converted.reshape(self.shape)), row)

    def _bare(self, value: list[bytes], where: Where) -> NDArray[Any]:
        joined = value[0] if len(value) == 1 else b""
        if not joined or len(joined) % self.dtype.itemsize:
            raise SampleError(f"{where()} holds {_told(value)}, which do not make {self.dtype} of shape {self.shape}")
        return np.frombuffer(joined, self.dtype.newbyteorder("<"))

    def _fits(self, count: int) -> bool:
        known = prod(side for side in self.shape if side != -1)
        return count % known == 0 if -1 in self.shape and known else count == known


def _refuse_unfit(numbers: NDArray[Any], dtype: np.dtype[Any], where: Where) -> None:
    """SampleError for floating-point numbers that are not all whole, and of this dtype of integers."""
    whole = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(whole).min, np.iinfo(whole).max)
    # The first power of two that is too large is a number of each kind; the largest that is not, may be rounded to it.
    fit = (numbers >= least) & (numbers < float(most + 1)) & (numbers == np.trunc(numbers))
    if not fit.all():
        raise SampleError(
            f"{where()} holds {numbers[~fit][0]:g}, which {dtype} does not; ask for a floating-point dtype"
        )


def _told(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return f"{len(value)} x {value.dtype}"
    return f"{len(value)} values of bytes" if len(value) != 1 else f"{len(value[0])} bytes"
