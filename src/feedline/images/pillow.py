"""Decoding by Pillow, for formats or builds without native kernels."""

from __future__ import annotations

import io
import math
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from feedline.errors import MissingExtraError
from feedline.images.crops import Geometry, Pixels
from feedline.images.errors import RAISE_LIMIT, describe_source, too_large, unreadable_error
from feedline.images.plugins import open_image, plugin_for
from feedline.images.recipe import Recipe, geometry

ImageSource = str | os.PathLike[str] | bytes | bytearray | memoryview | mmap.mmap | Pixels
"""A path; the bytes of a file (never copied); or pixels: uint8 of shape (height, width, 3), with any strides."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header of an image, read without decoding.

    `width` and `height` are as stored, before `orientation` is applied. `format` is Pillow's name ("JPEG", "PNG", …),
    or "pixels". `components` is the number of color channels; `progressive` is True for such a JPEG. `orientation` is
    the EXIF value, 1 to 8; 1 is upright.
    """

    width: int
    height: int
    format: str
    components: int
    progressive: bool
    orientation: int


def is_pixels(source: ImageSource) -> bool:
    """True for an array of pixels, which needs no decoding."""
    return isinstance(source, np.ndarray | memoryview) and source.ndim != 1


def check_pixels(source: Any, row: int | None) -> Pixels:
    """The array of a source for which `is_pixels` is true.

    TypeError if it is no image, ImageError if it has no pixels.
    """
    array = np.asarray(source)
    if array.ndim != 3 or array.shape[2] != 3:
        raise TypeError(
            f"{describe_source(source, row)} must be bytes, or pixels of shape (height, width, 3), not {array.shape}"
        )
    if array.dtype != np.uint8:
        raise TypeError(
            f"{describe_source(source, row)} must be of uint8, not {array.dtype}: convert its levels to 0 to 255 first"
        )
    if not array.size:
        raise unreadable_error(source, row, f"it is an array without pixels, of shape {array.shape}")
    return array


def check_regular(path: str | os.PathLike[str], row: int | None = None) -> None:
    """Refuse a pipe or device, whose opening or reading could wait forever."""
    mode = os.stat(path).st_mode  # noqa: PTH116 - called for each image
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # the opening of a folder raises its own error
        raise unreadable_error(path, row, "it is not a regular file")


_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


_UNLIMITED = 1 << 61


def pixel_limit(factor: int = 2) -> int:
    """Largest number of pixels that Pillow accepts; 0 for no limit.

    Pillow takes any number as its limit. With a `factor` of 1, the number above which it warns.
    """
    limit = Image.MAX_IMAGE_PIXELS
    if limit is None or not limit < _UNLIMITED:  # also infinity and NaN
        return 0
    return max(1, math.floor(factor * limit))


def pixels(source: ImageSource, row: int | None, oriented: bool) -> Pixels:
    """Decode a whole image with Pillow's `convert("RGB")`; of animations, the first frame."""
    with _open(source, row) as image, _translate_errors(source, row):
        return np.asarray(_load(image, oriented))


def header(source: ImageSource, row: int | None = None) -> Header:
    with _open(source, row) as image, _translate_errors(source, row):
        name = "JPEG" if _is_jpeg(image) else str(image.format)
        progressive = bool(image.info.get("progressive", 0))
        # Pillow turns TIFFs upright itself, and reports the size of the upright image.
        orientation = 1 if image.format == "TIFF" else _orientation(image)
        return Header(image.width, image.height, name, len(image.getbands()), progressive, orientation)


def levels(source: ImageSource, row: int | None, recipe: Recipe, key: int | None) -> Pixels:
    """Row of `recipe` before the conversion to numbers: uint8, (height, width, 3)."""
    if is_pixels(source):
        image = Image.fromarray(np.ascontiguousarray(source))
        return _window(image, geometry(recipe, key, *image.size), 1, recipe)
    with _open(source, row) as image:
        if recipe.scaled_decode and _is_jpeg(image) and image.mode != "CMYK":
            return _scaled_levels(image, source, row, recipe, key)
        with _translate_errors(source, row):
            upright = _load(image, recipe.apply_exif_orientation)
    return _window(upright, geometry(recipe, key, *upright.size), 1, recipe)


def _scaled_levels(image: Image.Image, source: ImageSource, row: int | None, recipe: Recipe, key: int | None) -> Pixels:
    with _translate_errors(source, row):
        orientation = _orientation(image) if recipe.apply_exif_orientation else 1
    width, height = image.size if orientation < 5 else image.size[::-1]
    plan = geometry(recipe, key, width, height)
    scale = _scale(plan)
    with _translate_errors(source, row):
        if scale > 1:
            image.draft("RGB", (image.width // scale, image.height // scale))
        upright = _load(image, recipe.apply_exif_orientation)
    shift = _shift(orientation, scale, upright.size, (width, height))
    return _window(upright, plan, scale, recipe, shift)


def _load(image: Image.Image, oriented: bool) -> Image.Image:
    image.load()  # Pillow turns some formats upright here, and drops their tag
    return (ImageOps.exif_transpose(image) if oriented else image).convert("RGB")


def _shift(orientation: int, scale: int, reduced: tuple[int, int], full: tuple[int, int]) -> tuple[float, float]:
    """Offset (x, y) of the pixels decoded at 1/scale along mirrored sides.

    The last pixel of a side may cover less than `scale` pixels. On a mirrored side the last pixel comes first, and
    shifts all others.
    """
    mirrored = orientation in {2, 3, 6, 7}, orientation in {3, 4, 7, 8}
    across, down = (small - whole / scale for small, whole in zip(reduced, full, strict=True))
    return across * mirrored[0], down * mirrored[1]


def _scale(plan: Geometry) -> int:
    """Denominator of the decoding scale: 1, 2, 4 or 8.

    The box stays at least twice as large as the output.
    """
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
    (x0, y0, x1, y1), padding = _covered(plan)
    across = _ResizedSide(plan.full[1], x - left, min(region.width, x - left + width), x0, x1)
    down = _ResizedSide(plan.full[0], y - top, min(region.height, y - top + height), y0, y1)
    shown = np.asarray(_resize(region, across, down, _FILTERS[recipe.interpolation]))
    if any(edge != (0, 0) for edge in padding):
        shown = np.pad(shown, padding)
    return shown[:, ::-1] if plan.flip else shown


_MOST_RESIZED = 1 << 26
"""Number of pixels up to which one pass makes a whole side."""


class _ResizedSide(NamedTuple):
    """One side of a resize, with the part that is shown.

    Pixels [begin, end) become `full` pixels, of which [first, last) are shown.
    """

    full: int
    begin: float
    end: float
    first: int
    last: int

    def shown(self) -> _ResizedSide:
        """The shown part alone.

        Pillow takes its bounds as float32, so its pixels may differ by a level from those of the whole side.
        """
        per = (self.end - self.begin) / self.full
        begin, end = self.begin + self.first * per, min(self.end, self.begin + self.last * per)
        return _ResizedSide(self.last - self.first, begin, end, 0, self.last - self.first)


def _resize(
    image: Image.Image, across: _ResizedSide, down: _ResizedSide, interpolation: Image.Resampling
) -> Image.Image:
    """Resize a region, and crop it to what is shown."""
    # One pass at a time, in the order in which Pillow since 13 resizes a whole image: rounding depends on it.
    shrinks = image.height - down.full
    down_first = shrinks > 0 and shrinks > 2 * (image.width - across.full)
    for is_down in (down_first, not down_first):
        width, height = image.size
        side = down if is_down else across
        if side.full * (width if is_down else height) > _MOST_RESIZED:  # a long image may become millions of lines
            side = side.shown()
        if is_down:
            whole = image.resize((width, side.full), interpolation, (0, side.begin, width, side.end))
            image = whole.crop((0, side.first, width, side.last))
        else:
            whole = image.resize((side.full, height), interpolation, (side.begin, 0, side.end, height))
            image = whole.crop((side.first, 0, side.last, height))
    return image


def _covered(plan: Geometry) -> tuple[tuple[int, int, int, int], list[tuple[int, int]]]:
    """Part of the window inside the image, and the zeros around it.

    The part is (left, top, right, bottom), the zeros are widths for `np.pad`.
    """
    x, y, width, height = plan.window
    x0, y0 = max(0, x), max(0, y)
    x1, y1 = min(plan.full[1], x + width), min(plan.full[0], y + height)
    return (x0, y0, x1, y1), [(y0 - y, y + height - y1), (x0 - x, x + width - x1), (0, 0)]


def _is_jpeg(image: Image.Image) -> bool:
    return image.format in {"JPEG", "MPO"}


def _orientation(image: Image.Image) -> int:
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return int(orientation) if orientation in range(1, 9) else 1


def _describe_content(source: Any) -> str:
    """Reason why Pillow cannot identify a source."""
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            beginning = file.read(8)
    else:
        beginning = bytes(memoryview(source)[:8])
    if not beginning:
        return "it is empty (0 bytes)"
    plugin = plugin_for(beginning)
    hint = f"; {plugin.format} files do so, too, and need pip install 'feedline[{plugin.extra}]'" if plugin else ""
    return f"its content is of no image format that Pillow knows (it begins with {beginning!r}{hint})"


@contextmanager
def _open(source: ImageSource, row: int | None) -> Iterator[Image.Image]:
    """Open an image; Pillow decodes when the pixels are first used."""
    content: Any = source  # anything with the buffer protocol, for which Python 3.11 has no type
    if isinstance(source, str | os.PathLike):
        check_regular(source, row)
    with _translate_errors(source, row):
        image = open_image(content if isinstance(source, str | os.PathLike) else io.BytesIO(content))
    with image:
        _check_size(image, source, row)
        yield image


def _check_size(image: Image.Image, source: ImageSource, row: int | None) -> None:
    # Pillow's plugins of some formats do not check the size when they open a file.
    limit = pixel_limit()
    if limit and image.width * image.height > limit:
        raise unreadable_error(source, row, *too_large(image.width, image.height, limit))


@contextmanager
def _translate_errors(source: ImageSource, row: int | None) -> Iterator[None]:
    """Raise Pillow's errors as ImageError; file errors keep their type."""
    try:
        yield
    except MissingExtraError:
        raise
    except UnidentifiedImageError:
        raise unreadable_error(source, row, _describe_content(source)) from None
    except Image.DecompressionBombError as error:
        raise unreadable_error(source, row, str(error).rstrip("."), RAISE_LIMIT) from error
    except OSError as error:
        if error.errno is not None:  # a missing file, a missing permission, a folder
            raise
        raise unreadable_error(source, row, str(error).rstrip(".")) from error
    except Exception as error:  # Pillow's plugins raise all kinds of exceptions for hostile files
        raise unreadable_error(source, row, f"{type(error).__name__}: {error}".rstrip(".")) from error
