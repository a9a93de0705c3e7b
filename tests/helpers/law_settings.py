"""Hypothesis settings of the laws, which have more examples in CI than other properties."""

from __future__ import annotations

import enum
import os
from typing import Any

from hypothesis import settings

CI_EXAMPLES = 300


class Reason(enum.Enum):
    """A reason to give a law fewer examples than the profile does."""

    PROCESSES = "examples start processes"
    SLOW = "an example takes more than 100 ms"
    COSTLY = "an example takes more than 10 ms of CPU, and `make test-nightly` takes all"


def law_settings(*, at_least: int = 0, at_most: int | None = None, because: Reason | None = None, **more: Any) -> Any:
    """Settings for a law: `CI_EXAMPLES` examples in CI, else as many as the profile has.

    `at_least` raises their number everywhere. `at_most` lowers it, for a stated reason. `more` are Hypothesis's.
    At night, laws have the examples of CI, and costly ones no fewer.
    """
    if (at_most is None) != (because is None):
        raise TypeError("a law with fewer examples has a reason: pass at_most= and because= together")
    is_night = bool(os.environ.get("NIGHTLY"))
    if is_night and because is Reason.COSTLY:
        at_most = None
    examples = max(CI_EXAMPLES if is_night or os.environ.get("CI") else settings().max_examples, at_least)
    return settings(**{"deadline": None, "max_examples": min(examples, at_most or examples), **more})
