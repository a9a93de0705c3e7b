"""Samples and batches as plain values, which can be compared and hashed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

_LEAVES = (str, bytes, bytearray, range, int, float, complex, type(None), np.generic, torch.Tensor)


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: Any, around: tuple[int, ...] = ()) -> Any:
    """The value as dicts and lists of what can be compared.

    That is, arrays, tensors and values with `==`. Images become arrays. Objects that have no `==` or no `repr` of their
    own become their attributes; without attributes, they become their `repr`, as values do that `==` compares part by
    part. A part that contains itself is None there.
    """
    if isinstance(value, _LEAVES):
        return value
    if id(value) in around:
        return None
    around = (*around, id(value))
    if isinstance(value, Mapping):
        return {key: plain(part, around) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [plain(part, around) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(part, around) for part in value), key=plain_repr)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, plain(value.tolist(), around)] if value.dtype.hasobject else value
    if hasattr(type(value), "__array_interface__"):
        return [type(value).__qualname__, getattr(value, "mode", ""), np.asarray(value)]
    return _plain_object(value, around)


def _plain_object(value: Any, around: tuple[int, ...]) -> Any:
    kind: Any = type(value)
    if isinstance(value, (type, FunctionType, ModuleType)):
        return plain_repr(value)
    if is_dataclass(value):
        return [kind.__qualname__, {each.name: plain(getattr(value, each.name), around) for each in fields(value)}]
    if kind.__eq__ is object.__eq__ or kind.__repr__ is object.__repr__:
        attributes = object.__getstate__(value)  # of `__dict__` and `__slots__`
        return [kind.__qualname__, plain(attributes, around)] if attributes else plain_repr(value)
    return value if isinstance(value == value, (bool, np.bool_)) else plain_repr(value)  # noqa: PLR0124


def plain_repr(value: Any) -> str:
    """The `repr` without addresses, which differ from process to process."""
    return _ADDRESS.sub("", repr(value))
