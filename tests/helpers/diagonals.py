"""Cases for several independent dimensions, without their product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def diagonal(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """As many cases as the longest dimension has values, and at least twice each value of the others.

    A value of a shorter dimension is combined with different values of the longest one. No two values of different
    dimensions always occur together, so a failure shows on which of them it depends.
    """
    longest = max(map(len, dimensions))
    return [tuple(values[at % len(values)] for values in dimensions) for at in range(longest)]


def at_night(*cases: Any) -> list[Any]:
    """Cases of `pytest.mark.parametrize` that only `make test-nightly` runs; tuples are unpacked."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly) for case in cases]


def by_day(cases: Sequence[Any], chosen: Sequence[Any]) -> list[Any]:
    """All cases, of which only those chosen run in `make test`."""
    return [*chosen, *at_night(*(case for case in cases if case not in chosen))]


def diagonal_by_day(*dimensions: Sequence[Any]) -> list[Any]:
    """The product as parameters: the cases of `diagonal` always, the others at night."""
    chosen = diagonal(*(range(len(values)) for values in dimensions))
    return [
        pytest.param(
            *(values[at] for values, at in zip(dimensions, places, strict=True)),
            marks=[] if places in chosen else pytest.mark.nightly,
        )
        for places in product(*(range(len(values)) for values in dimensions))
    ]
