"""Errors of images that cannot be read."""

from __future__ import annotations

import os
from typing import Any

from feedline.errors import SampleError

REMEDY = "Replace or remove it, or pass on_error='skip' to the loader to leave such samples out."


class ImageError(SampleError):
    """Image that cannot be read.

    `row` is its position in the batch, None for a single image.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


def describe_source(source: Any, row: int | None) -> str:
    """Name of a source: its path, or else its row."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    return "the image" if row is None else f"the image in row {row}"


def unreadable_error(source: Any, row: int | None, reason: str, remedy: str = REMEDY) -> ImageError:
    return ImageError(f"{describe_source(source, row)} could not be read: {reason}. {remedy}", row)


def too_large(width: int, height: int, limit: int) -> tuple[str, str]:
    """Reason and remedy for an image with more pixels than Pillow's limit."""
    reason = (
        f"it has {width} × {height} = {width * height:,} pixels, more than the limit of {limit:,}"
        " (twice PIL.Image.MAX_IMAGE_PIXELS) that guards against decompression bombs"
    )
    return reason, RAISE_LIMIT


RAISE_LIMIT = "To read such images, raise PIL.Image.MAX_IMAGE_PIXELS."
