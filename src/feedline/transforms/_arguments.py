"""What transforms accept as arguments, and how they say that something else was given."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from feedline.errors import ArgumentError
from feedline.images.recipe import INTERPOLATIONS

Size = int | Sequence[int]
"""Pixels: one number for a square, or (height, width)."""


Interval = tuple[float, float]


_PILLOW_FILTERS = {2: "bilinear", 3: "bicubic"}


def settle(transform: object, **values: Any) -> None:
    """Set the fields of a frozen transform, from within its constructor."""
    for name, value in values.items():
        object.__setattr__(transform, name, value)


def refusal(transform: object, argument: str, value: object, remedy: str) -> ArgumentError:
    return ArgumentError(f"{type(transform).__name__}({argument}={value!r}): {remedy}")


def area(transform: object, argument: str, value: Any) -> tuple[int, int]:
    """A `Size` as (height, width)."""
    sides = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value, value)
    if len(sides) not in (1, 2) or not all(map(_is_side, sides)):
        raise refusal(transform, argument, value, "give one number of pixels, at least 1, or (height, width)")
    return operator.index(sides[0]), operator.index(sides[-1])


def _is_side(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and operator.index(value) >= 1


def interval(transform: object, argument: str, value: Any, low: float = 0.0, high: float = math.inf) -> Interval:
    """Two numbers in order, within [low, high]."""
    try:
        first, last = (float(end) for end in value)
    except (TypeError, ValueError):
        raise refusal(transform, argument, value, "give two numbers, the lower and the upper bound") from None
    if first > last:
        raise refusal(transform, argument, value, f"the lower bound comes first; write {argument}=({last}, {first})")
    if not (low <= first and last <= high and math.isfinite(last)):
        raise refusal(transform, argument, value, f"both bounds must lie {_range(low, high)}")
    return first, last


def positive_interval(transform: object, argument: str, value: Any, high: float = math.inf) -> Interval:
    """Two numbers in order, above 0."""
    first, last = interval(transform, argument, value, 0.0, high)
    if first == 0:
        raise refusal(transform, argument, value, "the lower bound must be above 0")
    return first, last


def probability(transform: object, argument: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise refusal(transform, argument, value, "a probability lies between 0 and 1")
    return float(value)


def border(transform: object, argument: str, value: Any) -> tuple[int, int, int, int]:
    """Padding as (left, top, right, bottom), from one number, (x, y), or all four."""
    sides = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(sides) not in (1, 2, 4) or not all(isinstance(side, int) and side >= 0 for side in sides):
        raise refusal(transform, argument, value, "give one number of pixels, (x, y) or (left, top, right, bottom)")
    left, top, right, bottom = sides * (4 // len(sides))
    return left, top, right, bottom


def levels(transform: object, argument: str, value: Any) -> int | tuple[int, ...]:
    """One level for all channels, or one for each."""
    each = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(each) not in (1, 3) or not all(isinstance(level, int) and 0 <= level <= 255 for level in each):
        raise refusal(transform, argument, value, "give a level from 0 to 255, or one for each of three channels")
    return each if len(each) == 3 else each[0]


def one_of(transform: object, argument: str, value: Any, choices: Sequence[Any]) -> Any:
    if value not in choices:
        raise refusal(transform, argument, value, f"choose {_either(tuple(map(repr, choices)))}")
    return value


def numbers(transform: object, argument: str, value: Any, counts: tuple[int, ...]) -> tuple[float, ...]:
    """As many finite numbers as one of `counts`."""
    try:
        found = tuple(float(number) for number in value)
    except (TypeError, ValueError):
        found = ()
    if len(found) not in counts or not all(map(math.isfinite, found)):
        raise refusal(transform, argument, value, f"give a sequence of {_either(counts)} finite numbers")
    return found


def weights(transform: object, argument: str, value: Any, count: int) -> tuple[float, ...]:
    """One weight for each of `count` choices; not all are 0."""
    found = numbers(transform, argument, value, (count,))
    if min(found) < 0 or not 0 < sum(found) < math.inf:
        raise refusal(transform, argument, value, "weights are at or above 0, and not all of them 0")
    return found


def interpolation(transform: object, value: Any) -> str:
    """The name of a filter; members of torchvision's `InterpolationMode` and Pillow's `Resampling` are known."""
    name = getattr(value, "value", value)
    name = _PILLOW_FILTERS.get(name, name) if isinstance(name, int) else name
    return str(one_of(transform, "interpolation", name, INTERPOLATIONS))


def _range(low: float, high: float) -> str:
    return f"between {low:g} and {high:g}" if math.isfinite(high) else f"at or above {low:g}"


def _either(choices: Sequence[object]) -> str:
    return " or ".join(map(str, choices))
