"""Where pictures come from, and what can be known of them before they are decoded."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | mmap.mmap | NDArray[np.uint8]
"""A path; the bytes of a file (never copied); or ready pixels: uint8 of shape (height, width, 3), in any strides."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the first bytes of a picture tell: its size as it is stored, before `orientation` is applied.

    `format` is Pillow's name ("JPEG", "PNG", …), or "pixels". `orientation` is the EXIF value, 1 to 8; 1 is upright.
    """

    width: int
    height: int
    format: str
    components: int
    progressive: bool
    orientation: int


def is_pixels(source: Source) -> bool:
    """Whether the source needs no decoding."""
    return isinstance(source, np.ndarray) and source.ndim != 1
