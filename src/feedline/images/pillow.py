"""Pictures through Pillow: every format but ordinary JPEG, and all of them where the native kernels were not built.

Where pictures come from, and what can be known of them before they are decoded.
"""

from __future__ import annotations

import io
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from feedline.images.errors import too_large, unreadable
from feedline.images.geometry import Geometry, geometry
from feedline.images.recipe import Recipe

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


Pixels = NDArray[np.uint8]


_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def pixel_limit() -> int:
    """The number of pixels above which Pillow refuses a picture; 0 if it has been told to refuse none."""
    return 2 * (Image.MAX_IMAGE_PIXELS or 0)


def pixels(source: Source, row: int | None, oriented: bool) -> Pixels:
    """The whole picture as Pillow's `convert("RGB")` gives it; of animations, the first frame."""
    with _opened(source, row) as image, _told(source, row):
        return np.asarray(_turned(image, _orientation(image) if oriented else 1).convert("RGB"))


def header(source: Source, row: int | None = None) -> Header:
    with _opened(source, row) as image, _told(source, row):
        name = "JPEG" if _is_jpeg(image) else str(image.format)
        progressive = bool(image.info.get("progressive", 0))
        return Header(image.width, image.height, name, len(image.getbands()), progressive, _orientation(image))


def levels(source: Source, row: int | None, recipe: Recipe, key: int | None) -> Pixels:
    """The row of `recipe` before it is turned into numbers: uint8, (height, width, 3)."""
    if is_pixels(source):
        image = Image.fromarray(np.ascontiguousarray(source))
        return _window(image, geometry(recipe, key, *image.size), 1, recipe)
    with _opened(source, row) as image:
        with _told(source, row):
            turn = _orientation(image) if recipe.apply_exif_orientation else 1
        width, height = image.size if turn < 5 else image.size[::-1]
        plan = geometry(recipe, key, width, height)
        scale = _scale(plan) if recipe.scaled_decode and _is_jpeg(image) and image.mode != "CMYK" else 1
        with _told(source, row):
            if scale > 1:
                image.draft("RGB", (image.width // scale, image.height // scale))
            picture = _turned(image, turn).convert("RGB")
    shift = _shift(turn, scale, picture.size, (width, height))
    return _window(picture, plan, scale, recipe, shift)


def _shift(turn: int, scale: int, reduced: tuple[int, int], full: tuple[int, int]) -> tuple[float, float]:
    """How far the last, incomplete pixel at 1/scale moves the others of a mirrored side, where it is the first."""
    mirrored = turn in {2, 3, 6, 7}, turn in {3, 4, 7, 8}
    across, down = (small - whole / scale for small, whole in zip(reduced, full, strict=True))
    return across * mirrored[0], down * mirrored[1]


def _scale(plan: Geometry) -> int:
    """The largest of 1, 2, 4, 8 by which the box can shrink and still be twice as large as the output."""
    (_, _, width, height), (full_height, full_width) = plan.box, plan.full
    most = min(width / full_width, height / full_height) / 2
    return max(scale for scale in (1, 2, 4, 8) if scale <= max(most, 1))


def _window(
    image: Image.Image, plan: Geometry, scale: int, recipe: Recipe, shift: tuple[float, float] = (0, 0)
) -> Pixels:
    x, y, width, height = (edge / scale for edge in plan.box)
    x, y = x + shift[0], y + shift[1]
    left, top = int(x), int(y)
    region = image.crop((left, top, min(image.width, math.ceil(x + width)), min(image.height, math.ceil(y + height))))
    (x0, y0, x1, y1), padding = _inside(plan)
    per_x, per_y = width / plan.full[1], height / plan.full[0]
    across = (x1 - x0, x - left + x0 * per_x, min(region.width, x - left + x1 * per_x))
    down = (y1 - y0, y - top + y0 * per_y, min(region.height, y - top + y1 * per_y))
    shown = np.asarray(_resized(region, plan.full, across, down, _FILTERS[recipe.interpolation]))
    if any(edge != (0, 0) for edge in padding):
        shown = np.pad(shown, padding)
    return shown[:, ::-1] if plan.flip else shown


def _resized(
    image: Image.Image,
    full: tuple[int, int],
    across: tuple[int, float, float],
    down: tuple[int, float, float],
    interpolation: Image.Resampling,
) -> Image.Image:
    """`across` and `down` give outputs, begin and end along each side.

    One pass at a time, in the order in which Pillow since 13 resizes the whole: rounding depends on it.
    """
    shrinks = image.height - full[0]
    down_first = shrinks > 0 and shrinks > 2 * (image.width - full[1])
    for is_down in (down_first, not down_first):
        if is_down:
            image = image.resize((image.width, down[0]), interpolation, (0, down[1], image.width, down[2]))
        else:
            image = image.resize((across[0], image.height), interpolation, (across[1], 0, across[2], image.height))
    return image


def _inside(plan: Geometry) -> tuple[tuple[int, int, int, int], list[tuple[int, int]]]:
    """The part of the window that the resized picture covers (left, top, right, bottom), and the zeros around it."""
    x, y, width, height = plan.window
    x0, y0 = max(0, x), max(0, y)
    x1, y1 = min(plan.full[1], x + width), min(plan.full[0], y + height)
    return (x0, y0, x1, y1), [(y0 - y, y + height - y1), (x0 - x, x + width - x1), (0, 0)]


def _is_jpeg(image: Image.Image) -> bool:
    return image.format in {"JPEG", "MPO"}


def _orientation(image: Image.Image) -> int:
    found = image.getexif().get(ExifTags.Base.Orientation, 1)
    return found if found in _UPRIGHT else 1


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    turn = _UPRIGHT.get(orientation)
    return image if turn is None else image.transpose(turn)


def _unknown(source: Any) -> str:
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            beginning = file.read(8)
    else:
        beginning = bytes(memoryview(source)[:8])
    if not beginning:
        return "it is empty (0 bytes)"
    return f"its content is of no image format that Pillow knows (it begins with {beginning!r})"


@contextmanager
def _opened(source: Source, row: int | None) -> Iterator[Image.Image]:
    """The picture with its header read; decoding comes with the first use of its pixels."""
    content: Any = source  # anything with the buffer protocol, which Python 3.11 cannot say
    with _told(source, row):
        image = Image.open(content if isinstance(source, str | os.PathLike) else io.BytesIO(content))
    with image:
        _refuse_bomb(image, source, row)
        yield image


def _refuse_bomb(image: Image.Image, source: Source, row: int | None) -> None:
    """For the formats whose plugins do not check the size themselves when they are opened."""
    limit = pixel_limit()
    if limit and image.width * image.height > limit:
        raise unreadable(source, row, *too_large(image.width, image.height, limit))


@contextmanager
def _told(source: Source, row: int | None) -> Iterator[None]:
    """What Pillow raises within the block comes out as an ImageError; errors of the file itself keep their type."""
    try:
        yield
    except UnidentifiedImageError:
        raise unreadable(source, row, _unknown(source)) from None
    except Image.DecompressionBombError as error:
        remedy = "Raise PIL.Image.MAX_IMAGE_PIXELS if such pictures are meant to be read."
        raise unreadable(source, row, str(error).rstrip("."), remedy) from error
    except OSError as error:
        if error.errno is not None:  # missing, not permitted, a folder
            raise
        raise unreadable(source, row, str(error).rstrip(".")) from error
    except Exception as error:  # plugins let anything out when a file is hostile
        raise unreadable(source, row, f"{type(error).__name__}: {error}".rstrip(".")) from error
