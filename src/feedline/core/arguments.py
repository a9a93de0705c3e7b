"""Checks of arguments that several rooms have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.errors import ArgumentError


def one_of_error(name: str, value: Any, allowed: Iterable[Any], remedy: str = "") -> ArgumentError:
    """The error for an argument with an unknown value."""
    return ArgumentError(
        f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}{remedy and f': {remedy}'}"
    )


def function_of(
    name: str, value: str | Callable[..., Any], known: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """`value` if it is a function; else the known function named so."""
    if callable(value):
        return value
    if value not in known:
        raise ArgumentError(f"{name}={value!r}: give a function, or one of {', '.join(known)}")
    return known[value]


def check_one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise `ArgumentError` unless `value` is allowed."""
    if value not in (allowed := tuple(allowed)):
        raise one_of_error(name, value, allowed)


def whole_numbers(
    name: Callable[[int], str], values: Sequence[Any], dtype: type[np.signedinteger[Any]]
) -> NDArray[Any]:
    """The values as an array; ArgumentError for fractions and NaN.

    Numbers that do not fit into `dtype` are refused, too. `name(number)` names a value.
    """
    limits = np.iinfo(dtype)
    kinds = set(map(type, values))
    if kinds == {int} and limits.min <= min(values) <= max(values) <= limits.max:
        return np.array(values, dtype)
    for number, value in enumerate(values):
        if not _is_whole(value, limits):
            raise ArgumentError(f"{name(number)}={value!r}: give whole numbers, from {limits.min} to {limits.max}")
    return np.array([*map(int, values)], dtype)


def _is_whole(value: Any, limits: np.iinfo[Any]) -> bool:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return bool(value == number) and limits.min <= number <= limits.max  # "1" differs from 1
