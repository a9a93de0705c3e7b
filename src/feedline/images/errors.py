"""What can be wrong with a picture, and how it is told."""

from __future__ import annotations

import os
from typing import Any

from feedline.errors import SampleError

REMEDY = "Replace or remove it, or pass on_error='skip' to the loader to leave such samples out."


class ImageError(SampleError):
    """A picture that cannot be read; `row` is its place in the batch, None for one read by itself."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


def named(source: Any, row: int | None) -> str:
    """How an error calls a source: by its path, else by its row."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    return "the image" if row is None else f"the image in row {row}"


def unreadable(source: Any, row: int | None, reason: str, remedy: str = REMEDY) -> ImageError:
    return ImageError(f"{named(source, row)} could not be read: {reason}. {remedy}", row)


def too_large(width: int, height: int, limit: int) -> tuple[str, str]:
    """Reason and remedy for a picture above Pillow's limit on pixels."""
    reason = (
        f"it has {width} × {height} = {width * height:,} pixels, more than the limit of {limit:,}"
        " (twice PIL.Image.MAX_IMAGE_PIXELS) that guards against decompression bombs"
    )
    return reason, "Raise PIL.Image.MAX_IMAGE_PIXELS if such pictures are meant to be read."
