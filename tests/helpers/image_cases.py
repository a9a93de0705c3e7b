"""Images for tests, cut from a photograph of scikit-learn, and their rows by Pillow."""

from __future__ import annotations

import io
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from feedline.images import Geometry

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def sample_photograph(name: str) -> Image.Image:
    """The pixels of a photograph of scikit-learn's, which is not imported: large test processes fork slowly."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    image = Image.open(Path(package.origin).parent / "datasets" / "images" / name).convert("RGB")
    return Image.fromarray(np.asarray(image))  # without the color profile, which all files made from it would include


@cache
def photograph() -> Image.Image:
    """A photograph of 1280 × 854 pixels."""
    return sample_photograph("china.jpg").resize((1280, 854), Image.Resampling.LANCZOS)


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """A part of the photograph, chosen by the seed, or all of it, stretched."""
    if width > 1280 or height > 854:
        return photograph().resize((width, height))
    rng = np.random.default_rng(seed)
    x, y = (int(rng.integers(0, most + 1)) for most in (1280 - width, 854 - height))
    return photograph().crop((x, y, x + width, y + height))


def encoded(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:  # noqa: A002 - Pillow's name
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def jpeg(width: int, height: int, seed: int = 0, **options: Any) -> bytes:
    """A JPEG. "4:1:1" and "4:4:0", which no encoder here supports, have the scrambled blocks of another sampling."""
    sampling = options.pop("sampling", "4:2:0")
    if sampling == "gray":
        return encoded(photo(width, height, seed).convert("L"), **options)
    if sampling == "RGB":
        return encoded(photo(width, height, seed), keep_rgb=True, **options)
    if sampling == "4:1:1":
        return _reinterpreted(width, height, (32, 8), "4:2:0", 0x41, seed, options)
    if sampling == "4:4:0":
        return _reinterpreted(width, height, (8, 16), "4:2:2", 0x12, seed, options)
    return encoded(photo(width, height, seed), subsampling=sampling, **options)


def _reinterpreted(
    width: int, height: int, mcu: tuple[int, int], sampling: str, factors: int, seed: int, options: Any
) -> bytes:
    """A JPEG with as many MCUs and blocks, and other sampling factors in its header."""
    columns, rows = -(-width // mcu[0]), -(-height // mcu[1])
    side = 16 if sampling == "4:2:0" else 8
    data = bytearray(encoded(photo(16 * columns, side * rows, seed), subsampling=sampling, **options))
    frame = _segment(data, {0xC0, 0xC1, 0xC2})
    data[frame + 5 : frame + 9] = height.to_bytes(2) + width.to_bytes(2)
    data[frame + 11] = factors
    return bytes(data)


def _segment(data: bytes | bytearray, markers: set[int]) -> int:
    at = 2
    while data[at + 1] not in markers:
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return at


def with_frame(data: bytes, **fields: int) -> bytes:
    """The same JPEG with another `marker`, `precision`, `height`, `width` or number of `components` in its header."""
    changed = bytearray(data)
    frame = _segment(data, {0xC0, 0xC1, 0xC2})
    places = {"marker": (1, 1), "precision": (4, 1), "height": (5, 2), "width": (7, 2), "components": (9, 1)}
    for name, value in fields.items():
        at, nbytes = places[name]
        changed[frame + at : frame + at + nbytes] = value.to_bytes(nbytes)
    return bytes(changed)


def intervals(data: bytes) -> np.ndarray:
    """The lengths of a JPEG's restart intervals, markers included."""
    scan = _segment(data, {0xDA})
    at = start = scan + 2 + int.from_bytes(data[scan + 2 : scan + 4])
    lengths = []
    while True:
        at = data.index(b"\xff", at) + 2
        if data[at - 1] == 0xD9:
            return np.array([*lengths, at - 2 - start], np.uint16)
        if 0xD0 <= data[at - 1] <= 0xD7:
            lengths.append(at - start)
            start = at


def rgb(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def by_pillow(image: Image.Image, plan: Geometry, interpolation: str) -> np.ndarray:
    """The row by Pillow: crop, resize of the whole box, window, flip."""
    x, y, width, height = plan.box
    box = image.crop((x, y, x + width, y + height)).resize(plan.full[::-1], FILTERS[interpolation], reducing_gap=None)
    left, top, width, height = plan.window
    row = np.asarray(box.crop((left, top, left + width, top + height)))
    return row[:, ::-1] if plan.flip else row


def apart(first: Any, second: Any) -> int:
    """The largest difference of two images in levels."""
    return int(np.abs(np.asarray(first).astype(int) - np.asarray(second).astype(int)).max())
