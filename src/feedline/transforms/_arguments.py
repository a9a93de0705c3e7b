"""Argument checks of the transforms."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from feedline.errors import ArgumentError
from feedline.images.recipe import INTERPOLATIONS

SizeArgument = int | Sequence[int]
"""Pixels: one number for a square, or (height, width)."""


Interval = tuple[float, float]


_PILLOW_FILTERS = {2: "bilinear", 3: "bicubic"}


def init_frozen(transform: object, **values: Any) -> None:
    """Set the fields of a frozen transform from its own constructor."""
    for name, value in values.items():
        object.__setattr__(transform, name, value)


def argument_error(transform: object, argument: str, value: object, remedy: str) -> ArgumentError:
    return ArgumentError(f"{type(transform).__name__}({argument}={value!r}): {remedy}")


def check_size(transform: object, argument: str, value: Any) -> tuple[int, int]:
    """Return a `SizeArgument` as (height, width)."""
    sides = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value, value)
    if len(sides) not in (1, 2) or not all(map(_is_side, sides)):
        raise argument_error(transform, argument, value, "give one number of pixels, at least 1, or (height, width)")
    return operator.index(sides[0]), operator.index(sides[-1])


def _is_side(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and operator.index(value) >= 1


def check_interval(transform: object, argument: str, value: Any, low: float = 0.0, high: float = math.inf) -> Interval:
    """Return two bounds as floats, in order and within [low, high]."""
    try:
        first, last = (float(end) for end in value)
    except (TypeError, ValueError):
        raise argument_error(transform, argument, value, "give two numbers, the lower and the upper bound") from None
    if first > last:
        remedy = f"the lower bound comes first; write {argument}=({last}, {first})"
        raise argument_error(transform, argument, value, remedy)
    if not (low <= first and last <= high and math.isfinite(last)):
        raise argument_error(transform, argument, value, f"both bounds must lie {_describe_range(low, high)}")
    return first, last


def check_positive_interval(transform: object, argument: str, value: Any) -> Interval:
    """Return two bounds as floats, in order and above 0."""
    first, last = check_interval(transform, argument, value, 0.0)
    if first == 0:
        raise argument_error(transform, argument, value, "the lower bound must be above 0")
    return first, last


def check_probability(transform: object, argument: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise argument_error(transform, argument, value, "a probability lies between 0 and 1")
    return float(value)


def check_padding(transform: object, argument: str, value: Any) -> tuple[int, int, int, int]:
    """Return padding as (left, top, right, bottom).

    Accepts one number, (x, y) or all four.
    """
    sides = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(sides) not in (1, 2, 4) or not all(isinstance(side, int) and side >= 0 for side in sides):
        remedy = "give one number of pixels, (x, y) or (left, top, right, bottom)"
        raise argument_error(transform, argument, value, remedy)
    left, top, right, bottom = sides * (4 // len(sides))
    return left, top, right, bottom


def check_levels(transform: object, argument: str, value: Any) -> int | tuple[int, ...]:
    """Return one level for all channels, or one for each."""
    each = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(each) not in (1, 3) or not all(isinstance(level, int) and 0 <= level <= 255 for level in each):
        remedy = "give a level from 0 to 255, or one for each of three channels"
        raise argument_error(transform, argument, value, remedy)
    return each if len(each) == 3 else each[0]


def check_choice(transform: object, argument: str, value: Any, choices: Sequence[Any]) -> Any:
    if value not in choices:
        raise argument_error(transform, argument, value, f"choose {_join_choices(tuple(map(repr, choices)))}")
    return value


def check_numbers(transform: object, argument: str, value: Any, counts: tuple[int, ...]) -> tuple[float, ...]:
    """Return a sequence of finite numbers whose length is one of `counts`."""
    try:
        numbers = tuple(float(number) for number in value)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) not in counts or not all(map(math.isfinite, numbers)):
        remedy = f"give a sequence of {_join_choices(counts)} finite numbers"
        raise argument_error(transform, argument, value, remedy)
    return numbers


def check_weights(transform: object, argument: str, value: Any, count: int) -> tuple[float, ...]:
    """Return one weight for each of `count` choices, not all 0."""
    weights = check_numbers(transform, argument, value, (count,))
    if min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise argument_error(transform, argument, value, "weights are at or above 0, and not all of them 0")
    return weights


def check_interpolation(transform: object, value: Any) -> str:
    """Return the name of a filter; accepts torchvision's `InterpolationMode` and Pillow's `Resampling`."""
    name = getattr(value, "value", value)
    name = _PILLOW_FILTERS.get(name, name) if isinstance(name, int) else name
    return str(check_choice(transform, "interpolation", name, INTERPOLATIONS))


def _describe_range(low: float, high: float) -> str:
    return f"between {low:g} and {high:g}" if math.isfinite(high) else f"at or above {low:g}"


def _join_choices(choices: Sequence[object]) -> str:
    return " or ".join(map(str, choices))
