"""Wrapped text in which a number and its unit stay together."""

from __future__ import annotations

import re
from textwrap import wrap as wrap_words
from typing import Any

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[%×]|(?:[mµn]?s|min|h|[kKMGTP]i?B|B)\b)")

_FIXED = "\u00a0"


def wrap(text: str, width: int, **options: Any) -> list[str]:
    """Lines of at most `width` columns, as by `textwrap.wrap`."""
    lines = wrap_words(_BEFORE_UNIT.sub(_FIXED, text), width, break_on_hyphens=False, **options)
    return [line.replace(_FIXED, " ") for line in lines]
