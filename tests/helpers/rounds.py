"""Numbers of rounds of tests that repeat what is random: few in `make test`, many in `make test-nightly`."""

from __future__ import annotations

import os


def rounds(few: int, many: int) -> int:
    """`many` where the variable NIGHTLY is set, as `make test-nightly` does, and `few` elsewhere."""
    return many if os.environ.get("NIGHTLY") else few
