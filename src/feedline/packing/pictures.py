"""One picture, changed as the options say."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from feedline import images
from feedline.packing.grids import Lengths, rewritten
from feedline.packing.options import Options

_DEFAULT_QUALITY = 90
_PILLOWS_MODES = {"JPEG": ("L", "RGB"), "PNG": ("L", "LA", "RGB", "RGBA")}


class Picture(NamedTuple):
    """The contents of a member that is a picture: field, bytes, grid, and why it has none where one was wanted."""

    field: str
    data: bytes
    lengths: Lengths | None = None
    reason: str = ""


def changed(data: bytes, field: str, options: Options) -> Picture:
    """The picture as the shard will hold it. ImageError or OSError where it cannot be read.

    What stays as it is has its header checked only. Resized pictures keep their format if it is JPEG (at quality 90
    unless the options name one) or PNG, and become PNG otherwise; orientation and colour profile stay.
    """
    header = images.probe(data)
    shrunk = _shrunk(header.width, header.height, options.shorter_side)
    if options.decoded:
        return Picture(_renamed(field, "npy"), _npy(_pixels(data, shrunk)))
    if options.quality is not None or shrunk is not None:
        wanted = "JPEG" if options.quality is not None or header.format == "JPEG" else "PNG"
        data = _encoded(data, wanted, shrunk, options.quality or _DEFAULT_QUALITY, header.orientation)
        field = _renamed(field, "jpg" if wanted == "JPEG" else "png")
    elif header.format != "JPEG":
        return Picture(field, data, None, f"{header.format}, not JPEG" if options.grid else "")
    return Picture(field, *rewritten(data)) if options.grid else Picture(field, data)


def _shrunk(width: int, height: int, shorter_side: int | None) -> tuple[int, int] | None:
    """Width and height with the shorter side bounded, None where it is short enough; rounded as torchvision does."""
    if shorter_side is None or min(width, height) <= shorter_side:
        return None
    if width <= height:
        return shorter_side, int(shorter_side * height / width)
    return int(shorter_side * width / height), shorter_side


def _renamed(field: str, extension: str) -> str:
    name, dot, _ = field.rpartition(".")
    return f"{name}{dot}{extension}"


def _pixels(data: bytes, shrunk: tuple[int, int] | None) -> NDArray[np.uint8]:
    pixels = images.decode(data)
    if shrunk is None:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(shrunk, Image.Resampling.BICUBIC))


def _npy(pixels: NDArray[np.uint8]) -> bytes:
    """A `.npy` file; in a tar its numbers begin at a multiple of 64 bytes: they are used where they are mapped."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(pixels), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def _encoded(data: bytes, wanted: str, shrunk: tuple[int, int] | None, quality: int, orientation: int) -> bytes:
    with Image.open(io.BytesIO(data)) as image:
        kept = _kept(image, orientation)
        plain = image if image.mode in _PILLOWS_MODES[wanted] else image.convert(_mode(image, wanted))
        plain = plain if shrunk is None else plain.resize(shrunk, Image.Resampling.BICUBIC)
        file = io.BytesIO()
        plain.save(file, wanted, **({"quality": quality} if wanted == "JPEG" else {}), **kept)
    return file.getvalue()


def _mode(image: Image.Image, wanted: str) -> str:
    return "RGBA" if wanted == "PNG" and (image.mode in {"PA", "La", "RGBa"} or "transparency" in image.info) else "RGB"


def _kept(image: Image.Image, orientation: int) -> dict[str, Any]:
    """What a reader needs to show the pixels rightly; a thumbnail of the old picture would be dead weight."""
    kept: dict[str, Any] = {}
    if orientation != 1:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        kept["exif"] = exif
    profile = image.info.get("icc_profile")
    return kept if not profile or image.mode == "CMYK" else {**kept, "icc_profile": profile}
