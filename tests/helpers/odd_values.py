"""Parsed JSON with an odd value at each place in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (None, -1, [1], {"x": 1}, "\0", "\ud800", "a" * 300)
"""Values that are wrong at most places of metadata."""


def each_odd(value: Any) -> Iterator[Any]:
    """Copies of a value, each with one of `ODD` in place of a part."""
    yield from ODD
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for odd in each_odd(value[key]):
            copy = value.copy()
            copy[key] = odd
            yield copy
