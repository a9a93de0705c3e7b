"""A contact sheet: pictures of a few samples, with their classes and keys."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from feedline import images
from feedline.cli.inspect.survey import label_of, spread
from feedline.cli.pack.sources import MemberSource, Sample, SampleList
from feedline.datasets.array_container import array
from feedline.datasets.webdataset import is_image
from feedline.errors import ArgumentError, SampleError

_TILE, _GAP, _TEXT = 176, 8, 34


_PAPER, _INK, _FAINT, _WARNING = (250, 250, 248), (28, 28, 30), (120, 120, 126), (176, 32, 32)


def write(listing: SampleList, path: Path, number: int, columns: int = 6) -> int:
    """Write the sheet of up to `number` samples, spread evenly; gives how many are on it."""
    shown = [sample for sample in listing.samples if _picture(sample) is not None]
    if not shown:
        raise ArgumentError("there is no picture to put on a contact sheet")
    chosen = [shown[at] for at in spread(len(shown), number)]
    columns = min(columns, len(chosen))
    rows = -(-len(chosen) // columns)
    sheet = Image.new("RGB", (_edge(columns, _TILE), _edge(rows, _TILE + _TEXT)), _PAPER)
    for place, sample in enumerate(chosen):
        row, column = divmod(place, columns)
        _draw(sheet, sample, listing.classes, _edge(column, _TILE), _edge(row, _TILE + _TEXT))
    sheet.save(path)
    return len(chosen)


def _edge(number: int, step: int) -> int:
    return _GAP + number * (step + _GAP)


def _picture(sample: Sample) -> MemberSource | None:
    """The first picture of a sample: an encoded one, or pixels."""
    return next((part for part in sample.parts if is_image(part.field) or part.field == "npy"), None)


def _draw(sheet: Image.Image, sample: Sample, classes: Sequence[str] | None, left: int, top: int) -> None:
    part = _picture(sample)
    assert part is not None
    pen = ImageDraw.Draw(sheet)
    try:
        tile = _tile(part)
        sheet.paste(tile, (left + (_TILE - tile.width) // 2, top + _TILE - tile.height))
    except (SampleError, ValueError, OSError):
        pen.rectangle((left, top, left + _TILE - 1, top + _TILE - 1), outline=_WARNING)
        pen.text((left + _TILE // 2, top + _TILE // 2), "cannot be read", _WARNING, _font(13), anchor="mm")
    below = top + _TILE + 2
    with suppress(SampleError, ValueError, OSError):  # the survey tells of it
        pen.text((left, below), _fitting(label_of(sample, classes) or "", 14), _INK, _font(14))
    pen.text((left, below + 17), _fitting(sample.key, 11, from_end=True), _FAINT, _font(11))


def _tile(part: MemberSource) -> Image.Image:
    data = part.read()
    pixels = images.decode(data, apply_exif_orientation=True) if part.field != "npy" else array(memoryview(data))
    tile = Image.fromarray(pixels)
    tile.thumbnail((_TILE, _TILE), Image.Resampling.LANCZOS)
    return tile.convert("RGB")


def _fitting(text: str, size: int, *, from_end: bool = False) -> str:
    """The text, cut until it is no wider than a tile."""
    font, whole = _font(size), text
    while text and font.getlength(text if text == whole else f"{text}…") > _TILE:
        text = text[1:] if from_end else text[:-1]
    if text == whole:
        return text
    return f"…{text}" if from_end else f"{text}…"


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)
