"""Hypothesis settings of the laws: more examples in CI than of other properties, and several times as many at night."""

from __future__ import annotations

import enum
import os
from typing import Any

from hypothesis import settings

CI_EXAMPLES, NIGHTLY_EXAMPLES = 100, 300


class Reason(enum.Enum):
    """A reason to give a law fewer examples than the profile does."""

    PROCESSES = "examples start processes"
    SLOW = "an example takes more than 100 ms"
    COSTLY = "an example takes more than 10 ms of CPU, and `make test-nightly` takes all"


def law_settings(*, at_least: int = 0, at_most: int | None = None, because: Reason | None = None, **more: Any) -> Any:
    """Settings for a law: `CI_EXAMPLES` in CI, `NIGHTLY_EXAMPLES` at night, else as many as the profile has.

    `at_least` raises their number at night. `at_most` lowers it, for a stated reason: at night, not of costly laws, and
    of others to four times as many. `more` are Hypothesis's.
    """
    if (at_most is None) != (because is None):
        raise TypeError("a law with fewer examples has a reason: pass at_most= and because= together")
    is_night = bool(os.environ.get("NIGHTLY"))
    if is_night:
        examples = max(NIGHTLY_EXAMPLES, at_least)
        at_most = None if at_most is None or because is Reason.COSTLY else 4 * at_most
    else:
        examples = CI_EXAMPLES if os.environ.get("CI") else settings().max_examples
    return settings(**{"deadline": None, "max_examples": min(examples, at_most or examples), **more})
