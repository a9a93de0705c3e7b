"""Cases for several dimensions that the code under test handles one by one, without their product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def diagonal(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """As many cases as the longest dimension has values, and at least twice each value of the others.

    Where it is so, a value of a shorter dimension meets different values of the longest one. No two values of
    different dimensions are together each time they occur, so a failure shows which of them it depends on.
    """
    longest = max(map(len, dimensions))
    return [tuple(values[at % len(values)] for values in dimensions) for at in range(longest)]
