"""Hypothesis settings of the laws: the profile sets the number of examples of a law."""

from __future__ import annotations

import enum
from typing import Any

from hypothesis import settings


class Reason(enum.Enum):
    """A reason to give a law fewer examples than the profile does."""

    PROCESSES = "examples start processes"
    SLOW = "an example takes more than 100 ms"


def law_settings(*, at_least: int = 0, at_most: int | None = None, because: Reason | None = None, **more: Any) -> Any:
    """Settings for a law: as many examples as the profile has, which are 300 in CI.

    `at_least` raises their number in every profile. `at_most` lowers it, for a stated reason. `more` are Hypothesis's.
    """
    if (at_most is None) != (because is None):
        raise TypeError("a law with fewer examples has a reason: pass at_most= and because= together")
    examples = max(settings().max_examples, at_least)
    return settings(**{"deadline": None, "max_examples": min(examples, at_most or examples), **more})
