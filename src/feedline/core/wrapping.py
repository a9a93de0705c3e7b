"""Text that fits the width and the encoding of a stream."""

from __future__ import annotations

import re
import shutil
import sys
from textwrap import wrap as wrap_words
from typing import Any

WIDTH = 80
"""Columns of text that does not go to a terminal."""


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[%×]|(?:[mµun]?s|min|h|[kKMGTP]i?B|B)\b)")

_FIXED = "\u00a0"


def wrap(text: str, width: int, **options: Any) -> list[str]:
    """Lines of at most `width` columns, as by `textwrap.wrap`.

    A number and its unit stay together.
    """
    lines = wrap_words(_BEFORE_UNIT.sub(_FIXED, text), width, break_on_hyphens=False, **options)
    return [line.replace(_FIXED, " ") for line in lines]


_ASCII = str.maketrans(
    {"→": "->", "×": "x", "µ": "u", "–": "-", "…": "...", "·": "|", "±": "+-"}
    | dict(zip("▁▂▃▄▅▆▇█░", "__--==##.", strict=True))
)


def columns(otherwise: int = WIDTH) -> int:
    """Width for printed text: of the terminal, else `otherwise`."""
    is_terminal = getattr(sys.stdout, "isatty", lambda: False)()
    return max(20, shutil.get_terminal_size((WIDTH, 24)).columns) if is_terminal else otherwise


def printable(text: str, encoding: str | None) -> str:
    """The text, with escapes for characters that the encoding lacks."""
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError as error:
        return text.translate(_ASCII).encode(error.encoding, "backslashreplace").decode(error.encoding)
    except LookupError:
        return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")
    return text
