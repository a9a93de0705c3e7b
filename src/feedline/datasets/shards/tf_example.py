"""Parser and decoders of `tf.train.Example` and `tf.train.SequenceExample` messages.

Features become tensors of the requested dtype and shape, or decoded bytes. tensorflow/core/example/feature.proto
defines the messages.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from feedline.core.dataset import TransformFunction
from feedline.core.sample_transform import SampleTransform
from feedline.core.tensors import torch_dtype
from feedline.datasets import protobuf
from feedline.datasets.base import Field
from feedline.datasets.decoding import DECODERS, Decode, Decoder, Where, decoder_of
from feedline.errors import ArgumentError, SampleError

FeatureValue = list[bytes] | NDArray[np.float32] | NDArray[np.int64]


class Steps(tuple[FeatureValue, ...]):
    """Values of a feature list of a SequenceExample, one for each step."""

    __slots__ = ()


def parse_example(data: bytes, wanted: Container[str] | None = None) -> dict[str, FeatureValue | Steps]:
    """Features by name: lists of bytes, float32 or int64 arrays.

    With `wanted`, only these features. A feature without any value is an empty list of bytes. Of features with the same
    name, the last one counts. ValueError for invalid bytes, and for a feature list with the name of a context feature.
    """
    # The context of a SequenceExample has the number and the type of the features of an Example.
    parsed: dict[str, FeatureValue | Steps] = {name: _feature(each) for name, each in _entries(data, 1, wanted)}
    lists = {name: _steps(each) for name, each in _entries(data, 2, wanted)}
    if both := parsed.keys() & lists.keys():
        raise ValueError(f"{min(both)!r} names a context feature and a feature list")
    return parsed | lists


def _entries(data: bytes, number: int, wanted: Container[str] | None) -> Iterator[tuple[str, bytes]]:
    """Wanted entries of the map in a field of a message."""
    for field, entries in protobuf.messages(data):
        if field == number:
            for name, value in (_entry(entry) for kind, entry in protobuf.messages(entries) if kind == 1):
                if wanted is None or name in wanted:
                    yield name, value


def _steps(data: bytes) -> Steps:
    return Steps(_feature(each) for number, each in protobuf.messages(data) if number == 1)


def _entry(data: bytes) -> tuple[str, bytes]:
    """Key and value of a map entry; empty if absent."""
    parts = dict(protobuf.messages(data))
    return parts.get(1, b"").decode("utf-8"), parts.get(2, b"")


def _feature(data: bytes) -> FeatureValue:
    value: FeatureValue = []
    for kind, values in protobuf.messages(data):
        if kind == 1:
            value = [each for number, each in protobuf.messages(values) if number == 1]
        elif kind == 2:
            value = _floats(values)
        elif kind == 3:
            value = _integers(values)
    return value


def _floats(data: bytes) -> NDArray[np.float32]:
    """Values of a FloatList: packed, unpacked, or both."""
    pieces = [bytes(value) for number, _, value in protobuf.fields(data) if number == 1 and not isinstance(value, int)]
    joined = b"".join(pieces)
    if len(joined) % 4:
        raise ValueError(f"a list of floats has {len(joined)} bytes, which is not a multiple of 4")
    return np.frombuffer(joined, "<f4").astype(np.float32)


def _integers(data: bytes) -> NDArray[np.int64]:
    """Values of an Int64List: packed, unpacked, or both."""
    pieces = [
        np.array([value], np.uint64) if isinstance(value, int) else protobuf.varints(value)
        for number, _, value in protobuf.fields(data)
        if number == 1
    ]
    return (np.concatenate(pieces) if pieces else np.empty(0, np.uint64)).view(np.int64)


Feature = Decode | DTypeLike | torch.dtype | tuple[DTypeLike | torch.dtype | Decode, tuple[int, ...]]


class EveryFeature(Decoder):
    """Decodes a record to all of its stored features.

    Numbers become 1-D tensors, bytes become lists, and feature lists become lists of these.
    """

    step = SampleTransform(None)

    def __call__(self, source: memoryview, row: int | None, where: Where) -> dict[str, Any]:  # noqa: ARG002 - as others
        features = _parse(source, None, where)
        # Sorted, because the order of protobuf map entries is arbitrary.
        return {name: _in_stored_type(value) for name, value in sorted(features.items())}


def _in_stored_type(value: FeatureValue | Steps) -> Any:
    if isinstance(value, Steps):
        return list(map(_in_stored_type, value))
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


class ChosenFeatures:
    """Decodes the requested features, each to the requested type.

    A feature that a record lacks is decoded from its value in `defaults`.
    """

    def __init__(
        self, features: Mapping[str, Feature], transforms: Mapping[str, TransformFunction], defaults: Mapping[str, Any]
    ) -> None:
        if not isinstance(features, Mapping):
            raise ArgumentError(
                f"columns={features!r}: pass a dict from the name of each feature to its type, such as"
                " {'label': 'int64'}"
            )
        self._decoders = {
            name: _build_decoder(name, feature, transforms.get(name)) for name, feature in features.items()
        }
        if unknown := [name for name in defaults if name not in features]:
            raise ArgumentError(f"defaults names {unknown[0]!r}, which is not in columns; drop it there, or add it")
        self._defaults = {name: _default(name, each, self._decoders[name]) for name, each in defaults.items()}

    @property
    def decoders(self) -> Collection[Decoder]:
        """Decoders of the features."""
        return self._decoders.values()

    def fields(self, record: memoryview, where: Where) -> dict[str, Field]:
        """Requested features of a record; SampleError names a missing one."""
        found = _parse(record, self._decoders, where)
        values = self._defaults | {name: value for name, value in found.items() if not self._is_absent(name, value)}
        if len(values) < len(self._decoders):
            missing = next(name for name in self._decoders if name not in values)
            there = ", ".join(sorted(_parse(record, None, where))) or "none"
            raise SampleError(
                f"{where()} has no feature {missing!r}; it has {there}. If it is optional, pass defaults={{{missing!r}:"
                " value}"
            )
        return {name: _field(name, values[name], decoder, where) for name, decoder in self._decoders.items()}

    def _is_absent(self, name: str, value: FeatureValue | Steps) -> bool:
        """True if a feature is missing, and has a default."""
        # TensorFlow writes an absent feature as a feature without a list, and also uses the default for it.
        return (
            name in self._defaults
            and isinstance(value, list)
            and not value
            and not isinstance(self._decoders[name], _BytesValues)
        )


def _field(name: str, value: FeatureValue | Steps, decoder: Decoder, where: Where) -> Field:
    def describe() -> str:
        return f"feature {name!r} of {where()}"

    if isinstance(decoder, (_NumbersDecoder, _BytesValues)):
        return Field(decoder, value, describe)
    if isinstance(value, Steps):
        raise SampleError(f"{describe()} has {len(value)} steps; make its type a list, such as ('image', (-1,))")
    if isinstance(value, np.ndarray) or len(value) != 1:
        several = "" if isinstance(value, np.ndarray) else "; make its type a list, such as ('text', (-1,))"
        raise SampleError(f"{describe()} holds {_describe(value)} instead of one bytes value{several}")
    return Field(decoder, value[0], describe)


def _default(name: str, value: Any, decoder: Decoder) -> FeatureValue:
    """A default, in the form of a record's values."""
    if isinstance(decoder, _NumbersDecoder):
        return decoder.default(name, value)
    texts = value if isinstance(decoder, _BytesValues) and isinstance(value, (list, tuple)) else [value]
    encoded = [each.encode() if isinstance(each, str) else each for each in texts]
    if not all(isinstance(each, bytes) for each in encoded):
        raise ArgumentError(f"defaults[{name!r}]={value!r:.100} must be bytes or str, as a record holds it")
    if isinstance(decoder, _BytesValues):
        decoder.check(encoded, lambda: f"defaults[{name!r}]", ArgumentError)
    return encoded


def _parse(record: memoryview, wanted: Mapping[str, Any] | None, where: Where) -> dict[str, FeatureValue | Steps]:
    try:
        return parse_example(bytes(record), wanted)
    except ValueError as error:  # UnicodeDecodeError is a ValueError
        raise SampleError(
            f"{where()} is not a tf.train.Example ({error}); pass decode='bytes' for other records"
        ) from error


def _build_decoder(name: str, feature: Feature, transform: TransformFunction | None) -> Decoder:
    if _is_decode(feature):
        return decoder_of(feature, transform)
    dtype: Any
    dtype, shape = feature if isinstance(feature, tuple) and len(feature) == 2 else (feature, ())
    if _is_decode(dtype) and _is_shape(shape) and len(shape) == 1:
        return _BytesValues(decoder_of(dtype, transform), shape[0])
    try:
        numbers = (
            torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
            if isinstance(dtype, torch.dtype)
            else np.dtype(dtype)
        )
    except TypeError:
        numbers = None
    if numbers is None or torch_dtype(numbers) is None or not _is_shape(shape):
        raise ArgumentError(
            f"columns[{name!r}]={feature!r} is neither a dtype, nor (dtype, shape) with at most one -1, such as"
            f" ('int64', (3,)), nor a function, nor one of {', '.join(DECODERS)}, nor a list of these, such as ('text',"
            " (-1,))"
        )
    return _NumbersDecoder(numbers, tuple(shape), SampleTransform(transform))


def _is_decode(feature: Any) -> TypeGuard[Decode]:
    """True for a word or function that decodes bytes."""
    return feature in DECODERS if isinstance(feature, str) else callable(feature) and not isinstance(feature, type)


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, Sequence) or not all(isinstance(side, int) and side >= -1 for side in shape):
        return False
    return shape.count(-1) <= (0 not in shape)  # the size of a side is unknown if another one is zero


@dataclass(frozen=True)
class _NumbersDecoder(Decoder):
    """Decodes a feature to a tensor.

    The numbers are in a list, or raw (little endian) in a single bytes value. Tensors of steps are stacked, or in a
    list if their shape is not fixed.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    step: SampleTransform

    def __call__(self, source: FeatureValue | Steps, row: int | None, where: Where) -> Any:
        return self.step(self._stack(source, where) if isinstance(source, Steps) else self._one(source, where), row)

    def default(self, name: str, value: Any) -> FeatureValue:
        """The numbers of a default; one number fills a fixed shape."""
        try:
            numbers = np.asarray(value)
            if not numbers.ndim and -1 not in self.shape:
                numbers = np.full(self.shape, value)
            source = numbers.ravel() if numbers.size else np.empty(0, np.int64)
            if source.dtype.kind not in "biuf":
                raise TypeError(f"{source.dtype} is not a numeric type")
            self._one(source, lambda: "it")
        except (ValueError, TypeError, OverflowError) as error:
            raise ArgumentError(f"defaults[{name!r}]={value!r:.100} does not fit its type: {error}") from error
        return source

    def _stack(self, steps: Steps, where: Where) -> Any:
        tensors = [self._one(each, lambda at=at: f"step {at} of {where()}") for at, each in enumerate(steps)]  # type: ignore[misc]
        if -1 in self.shape:
            return tensors
        return torch.stack(tensors) if tensors else torch.from_numpy(np.empty((0, *self.shape), self.dtype))

    def _one(self, source: FeatureValue, where: Where) -> torch.Tensor:
        numbers = source if isinstance(source, np.ndarray) else self._raw_numbers(source, where)
        if not self._fits(len(numbers)):
            raise SampleError(
                f"{where()} holds {_describe(source)}, which do not make {self.dtype} of shape {self.shape}"
            )
        if numbers.dtype.kind == "f" and self.dtype.kind in "iub":
            _check_integers(numbers, self.dtype, where)
        with np.errstate(over="ignore"):
            converted = numbers.astype(self.dtype)
        if numbers.dtype.kind in "iu" and _are_changed(numbers, converted):
            raise SampleError(f"{where()} holds numbers that {self.dtype} cannot represent; request a wider dtype")
        return torch.from_numpy(converted.reshape(self.shape))

    def _raw_numbers(self, value: list[bytes], where: Where) -> NDArray[Any]:
        joined = value[0] if len(value) == 1 else None
        if joined is None or len(joined) % self.dtype.itemsize:
            raise SampleError(
                f"{where()} holds {_describe(value)}, which do not make {self.dtype} of shape {self.shape}"
            )
        return np.frombuffer(joined, self.dtype.newbyteorder("<"))

    def _fits(self, count: int) -> bool:
        known = prod(side for side in self.shape if side != -1)
        return count % known == 0 if -1 in self.shape and known else count == known


class _BytesValues(Decoder):
    """Decodes several bytes values, or one of each step, to a list.

    `count` is their number; -1 for any. A transform is applied to each.
    """

    def __init__(self, each: Decoder, count: int) -> None:
        self._each, self._count, self.step = each, count, each.step

    @property
    def uses_keys(self) -> bool:
        return self._each.uses_keys

    def __call__(self, source: FeatureValue | Steps, row: int | None, where: Where) -> list[Any]:
        values = _one_of_each(source, where) if isinstance(source, Steps) else source
        self.check(values, where, SampleError)
        return [self._each(value, row, where) for value in values]

    def check(self, values: FeatureValue, where: Where, kind: type[Exception]) -> None:
        """Raise `kind` unless the number of values is right."""
        if isinstance(values, np.ndarray) or self._count not in (-1, len(values)):
            count = "bytes values" if self._count == -1 else f"{self._count} bytes values"
            raise kind(f"{where()} holds {_describe(values)} instead of {count}")


def _one_of_each(steps: Steps, where: Where) -> list[bytes]:
    """The single bytes value of each step."""
    for at, value in enumerate(steps):
        if isinstance(value, np.ndarray) or len(value) != 1:
            raise SampleError(f"step {at} of {where()} holds {_describe(value)} instead of one bytes value")
    return [bytes(value[0]) for value in steps]


def _check_integers(numbers: NDArray[Any], dtype: np.dtype[Any], where: Where) -> None:
    """Raise SampleError unless all floats are integers in the range of `dtype`."""
    whole = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(whole).min, np.iinfo(whole).max)
    # Compared with the maximum plus one, a power of two, which is exact in floats; the maximum itself may be rounded.
    fit = (numbers >= least) & (numbers < float(most + 1)) & (numbers == np.trunc(numbers))
    if not fit.all():
        raise SampleError(
            f"{where()} holds {numbers[~fit][0]:g}, which {dtype} cannot represent; request a floating-point dtype"
        )


def _are_changed(numbers: NDArray[Any], converted: NDArray[Any]) -> bool:
    """True if not all integers are equal to the converted numbers."""
    if converted.dtype.kind not in "fc":
        return bool((converted != numbers).any())
    # NumPy would round both for a comparison. Floats are compared as integers, if they are in the range of integers.
    wide = converted.real.astype(np.float64)
    least, most = np.iinfo(numbers.dtype).min, np.iinfo(numbers.dtype).max
    inside = (wide >= float(least)) & (wide < float(most + 1))
    return not inside.all() or bool((wide.astype(numbers.dtype) != numbers).any())


def _describe(value: FeatureValue) -> str:
    if isinstance(value, np.ndarray):
        return f"{len(value)} x {value.dtype}"
    return f"{len(value)} bytes values" if len(value) != 1 else f"{len(value[0])} bytes"
