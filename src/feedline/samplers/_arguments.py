"""Checks of the samplers' arguments.

Each returns the value in a fixed type, or raises `ArgumentError` with name, value and remedy.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.arguments import check_one_of
from feedline.errors import ArgumentError


def integer(name: str, value: Any, low: int, remedy: str = "") -> int:
    """`value` as an int of at least `low`; bools are refused."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} must be an integer, but is {value!r}{_suffix(remedy)}") from None
    if number < low:
        raise ArgumentError(f"{name} must be at least {low}, but is {number}{_suffix(remedy)}")
    return number


def count(name: str, value: Any, default: int) -> int:
    """`value` as a positive int; `default` for None."""
    return default if value is None else integer(name, value, 1)


def seed(value: Any) -> int:
    """A seed as an int of any sign."""
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(
            f"seed must be an integer, but is {value!r}: a fixed order needs a number as its seed"
        ) from None


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """`value`, if it is one of `allowed`."""
    check_one_of(name, value, allowed)
    return str(value)


def vector(name: str, values: Any) -> NDArray[Any]:
    """A non-empty 1-D array made from a sequence, array or tensor."""
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    except ValueError as error:
        raise ArgumentError(f"{name} must be one-dimensional: {error}") from None
    if array.ndim != 1:
        raise ArgumentError(f"{name} must be one-dimensional, but has the shape {array.shape}: one entry per sample")
    if not len(array):
        raise ArgumentError(f"{name} is empty: an order needs at least one sample")
    return array


def integers(name: str, values: Any, low: int) -> NDArray[np.int64]:
    """`values` as a 1-D int64 array with elements of at least `low`."""
    array = vector(name, values)
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"{name} must hold integers, but holds {array.dtype}")
    if array.min() < low:
        at = int(array.argmin())
        raise ArgumentError(f"{name} must be at least {low}, but {name}[{at}] is {array[at]}")
    if array.max() > np.iinfo(np.int64).max:
        at = int(array.argmax())
        raise ArgumentError(f"{name} must be below 2**63, but {name}[{at}] is {array[at]}")
    return array.astype(np.int64)


def weights(name: str, values: Any, what: str = "sample") -> NDArray[np.float64]:
    """`values` as a 1-D float64 array of weights, one for each `what`.

    ArgumentError for negative or non-finite elements, and if all are zero.
    """
    array = vector(name, values)
    if array.dtype.kind not in "fiub":
        raise ArgumentError(f"{name} must hold numbers, but holds {array.dtype}")
    array = array.astype(np.float64)
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        at = int(wrong.argmax())
        raise ArgumentError(f"{name} must be finite and not negative, but {name}[{at}] is {array[at]}: 0 means never")
    if not array.any():
        raise ArgumentError(f"{name} are all zero: at least one {what} needs a weight above 0")
    return array


def _suffix(remedy: str) -> str:
    return f": {remedy}" if remedy else ""
