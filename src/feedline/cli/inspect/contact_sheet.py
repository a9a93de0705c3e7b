"""A contact sheet: images of samples with their classes and keys."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from feedline import images
from feedline.cli.inspect.survey import label_of, spread
from feedline.datasets.array_container import array
from feedline.datasets.sample_lists import Sample, SampleList, SamplePart
from feedline.errors import ArgumentError, SampleError

_TILE, _GAP, _TEXT = 176, 8, 34


_PAPER, _INK, _FAINT, _WARNING = (250, 250, 248), (28, 28, 30), (120, 120, 126), (176, 32, 32)


def check_path(path: Path) -> None:
    """Raise `ArgumentError` if a sheet cannot be written to this path."""
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.SAVE}
    if path.suffix.lower() not in known:
        raise ArgumentError(f"--contact-sheet: the name {path.name} has no ending of an image format; use .png or .jpg")
    if not path.parent.is_dir():
        raise ArgumentError(f"--contact-sheet: there is no folder {path.parent}; make it, or name another one")


def write(listing: SampleList, path: Path, number: int, columns: int = 6) -> int:
    """Draw up to `number` evenly spaced samples, and return their number.

    Raises `ArgumentError` if no sample has an image.
    """
    drawable = [sample for sample in listing.samples if _find_image(sample) is not None]
    if not drawable:
        raise ArgumentError("no image for a contact sheet: no sample contains an encoded image or an array of pixels")
    chosen = [drawable[i] for i in spread(len(drawable), number)]
    columns = min(columns, len(chosen))
    rows = -(-len(chosen) // columns)
    sheet = Image.new("RGB", (_offset(columns, _TILE), _offset(rows, _TILE + _TEXT)), _PAPER)
    for place, sample in enumerate(chosen):
        row, column = divmod(place, columns)
        _draw(sheet, sample, listing.classes, _offset(column, _TILE), _offset(row, _TILE + _TEXT))
    sheet.save(path)
    return len(chosen)


def _offset(number: int, step: int) -> int:
    return _GAP + number * (step + _GAP)


def _find_image(sample: Sample) -> SamplePart | None:
    """The first image of a sample, encoded or as pixels."""
    return next((part for part in sample.parts if part.kind in ("image", "array")), None)


def _draw(sheet: Image.Image, sample: Sample, classes: Sequence[str] | None, left: int, top: int) -> None:
    part = _find_image(sample)
    assert part is not None
    pen = ImageDraw.Draw(sheet)
    try:
        tile = _tile(part)
        sheet.paste(tile, (left + (_TILE - tile.width) // 2, top + _TILE - tile.height))
    except (SampleError, ValueError, OSError, TypeError, IndexError):  # Pillow's errors for arrays that are no image
        pen.rectangle((left, top, left + _TILE - 1, top + _TILE - 1), outline=_WARNING)
        pen.text((left + _TILE // 2, top + _TILE // 2), "cannot be read", _WARNING, _font(13), anchor="mm")
    below = top + _TILE + 2
    with suppress(SampleError, ValueError, OSError):  # the survey reports it
        pen.text((left, below), _shorten(label_of(sample, classes) or "", 14), _INK, _font(14))
    pen.text((left, below + 17), _shorten(sample.key, 11, from_end=True), _FAINT, _font(11))


def _tile(part: SamplePart) -> Image.Image:
    data = part.read()
    pixels = images.decode(data, apply_exif_orientation=True) if part.kind == "image" else array(memoryview(data))
    tile = Image.fromarray(pixels)
    tile.thumbnail((_TILE, _TILE), Image.Resampling.LANCZOS)
    return tile.convert("RGB")


def _shorten(text: str, size: int, *, from_end: bool = False) -> str:
    """The text, cut to the width of a tile with an ellipsis."""
    font, full = _font(size), text
    while text and font.getlength(text if text == full else f"{text}…") > _TILE:
        text = text[1:] if from_end else text[:-1]
    if text == full:
        return text
    return f"…{text}" if from_end else f"{text}…"


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)
