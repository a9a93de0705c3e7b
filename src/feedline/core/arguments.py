"""Checks of arguments that several rooms have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from feedline.errors import ArgumentError


def one_of_error(name: str, value: Any, allowed: Iterable[Any], remedy: str = "") -> ArgumentError:
    """The error for an argument with an unknown value."""
    return ArgumentError(
        f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}{remedy and f': {remedy}'}"
    )


def check_one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise `ArgumentError` unless `value` is allowed."""
    if value not in (allowed := tuple(allowed)):
        raise one_of_error(name, value, allowed)
