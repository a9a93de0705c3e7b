"""Amounts of bytes in text."""

from __future__ import annotations

import re

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)


_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def nbytes_of(text: str) -> int | None:
    """The bytes of "200 GB", "1.5GiB", "64k" or "1024".

    None if the text is not an amount.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[(match[2] or "").lower()])
