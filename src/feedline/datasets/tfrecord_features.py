"""What the features of an example become: tensors of the dtype and shape that were asked for, or decoded bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import DECODERS, Decode, Decoding, Step
from feedline.datasets.examples import Value, parsed
from feedline.datasets.records import Decodes, Field
from feedline.errors import ArgumentError, SampleError
from feedline.rows import torch_dtype

Feature = Decode | DTypeLike | torch.dtype | tuple[DTypeLike | torch.dtype, tuple[int, ...]]
Where = Callable[[], str]


class EveryFeature:
    """Decodes whole records to all features as they are: numbers as 1-D tensors, bytes as lists."""

    step = Step(None)
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
                f"features={features!r}: give a dict that says by name what each becomes, such as {{'label': 'int64'}}"
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
            f"features[{name!r}]={feature!r} is no dtype, (dtype, shape) with at most one -1 such as ('int64', (3,)),"
            f" function, nor one of {', '.join(DECODERS)}"
        )
    return _Numbers(numbers, tuple(shape), Step(transform))


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, Sequence) or not all(isinstance(side, int) and side >= -1 for side in shape):
        return False
    return shape.count(-1) <= 1


@dataclass(frozen=True)
class _Numbers:
    """A tensor; its numbers are listed, or lie bare (little endian) in one value of bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    step: Step
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
