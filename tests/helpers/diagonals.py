"""Cases for several independent dimensions, without their product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def diagonal(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """As many cases as the longest dimension has values, and at least twice each value of the others.

    A value of a shorter dimension is combined with different values of the longest one. No two values of different
    dimensions always occur together, so a failure shows on which of them it depends.
    """
    longest = max(map(len, dimensions))
    return [tuple(values[at % len(values)] for values in dimensions) for at in range(longest)]
