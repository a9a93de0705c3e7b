"""Checks of arguments that several rooms have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
