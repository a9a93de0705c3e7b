"""Comparison of nested samples and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch


def check_same(expected: Any, got: Any, promise: str) -> None:
    """Raise `AssertionError` with `promise` and the first difference, if any."""
    text = difference(expected, got)
    assert text is None, f"{promise}: {text}"


def difference(one: Any, other: Any, place: str = "it") -> str | None:
    """Description of the first difference between two nested values.

    None if they are equal. All values must have equal types. Mappings must have equal keys in the same order, and
    tensors and arrays equal dtypes, shapes and values. Dataclasses are compared by fields. NaN equals NaN. Other
    values, such as images, are compared with `==`. `place` names the values in the description.
    """
    if type(one) is not type(other):
        return f"{place} is {type(one).__name__} once and {type(other).__name__} once"
    if isinstance(one, torch.Tensor):
        return _between_tensors(one, other, place)
    if isinstance(one, np.ndarray):
        return _between_arrays(one, other, place)
    if isinstance(one, Mapping):
        return _between_mappings(one, other, place)
    if isinstance(one, Sequence) and not isinstance(one, (str, bytes, bytearray, range)):
        return _between_sequences(one, other, place)
    if is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in fields(one) if field.compare]
        texts = (difference(getattr(one, name), getattr(other, name), f"{place}.{name}") for name in names)
        return next((text for text in texts if text), None)
    if one == other or (one != one and other != other):  # noqa: PLR0124 - NaN
        return None
    return f"{place} is {_short(one)} once and {_short(other)} once"


def _between_tensors(one: torch.Tensor, other: torch.Tensor, place: str) -> str | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{place} is {one.dtype} {tuple(one.shape)} once and {other.dtype} {tuple(other.shape)} once"
    if one.dtype is torch.complex32:  # which torch cannot compare
        one, other = one.to(torch.complex64), other.to(torch.complex64)
    if torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all()):
        return None
    return f"{place} has other values"


def _between_arrays(one: Any, other: Any, place: str) -> str | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{place} is {one.dtype} {one.shape} once and {other.dtype} {other.shape} once"
    if not np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"):
        return f"{place} has other values"
    return None


def _between_mappings(one: Any, other: Any, place: str) -> str | None:
    if list(one) != list(other):
        return f"{place} has the keys {list(one)} once and {list(other)} once"
    texts = (difference(one[key], other[key], f"{place}[{key!r}]") for key in one)
    return next((text for text in texts if text), None)


def _between_sequences(one: Any, other: Any, place: str) -> str | None:
    if len(one) != len(other):
        return f"{place} has {len(one)} parts once and {len(other)} once"
    texts = (difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
    return next((text for text in texts if text), None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
