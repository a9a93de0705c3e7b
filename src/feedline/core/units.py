"""Numbers and amounts of bytes, parsed from text."""

from __future__ import annotations

import re
from math import isfinite

DECIMAL = r"\d+(?:\.\d*)?|\.\d+"
"""Pattern of a number without a sign, as `float` reads it."""


_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)


_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_nbytes(text: str) -> int | None:
    """The bytes of "200 GB", "1.5GiB", "64k" or "1024".

    None if the text is not an amount.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        return None
    base = 1024 if match[3] else 1000
    nbytes = float(match[1]) * base ** _POWERS[(match[2] or "").lower()]
    return int(nbytes) if isfinite(nbytes) else None
