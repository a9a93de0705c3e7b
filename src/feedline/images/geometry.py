"""The law by itself: from a key and the size of a picture to the box that is read and where it lands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from feedline.core.rng import torch_keys
from feedline.images.recipe import CenterBox, RandomBox, Recipe, WholeBox

Box = tuple[int, int, int, int]
"""x, y, width, height."""


_MASK64 = (1 << 64) - 1


_GOLDEN = 0x9E3779B97F4A7C15


_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class Geometry:
    """Which pixels go where.

    The pixels of `box` (x, y, width, height; no other is read) are resized to `full` (height, width), of which the
    row shows `window` (x, y, width, height), mirrored if `flip`. What of the window lies outside of `full` is zero.
    """

    box: Box
    flip: bool
    full: tuple[int, int]
    window: Box


def geometry(recipe: Recipe, key: int | None, width: int, height: int) -> Geometry:
    """What `read_batch` does with a picture of this size in a row with this key, bit for bit.

    The key is the source of u_0, u_1, … in [0, 1), splitmix64's outputs: for `RandomBox` area and ratio of each
    attempt, then x and y of the one that fits; one more for the flip. None draws a key from torch's generator.
    """
    if key is None:
        key = int(torch_keys(1)[0]) if recipe.draws else 0
    draws = _uniforms(key & _MASK64)
    law, size = recipe.law, recipe.size
    window = (0, 0, size[1], size[0])
    if isinstance(law, RandomBox):
        box, full = _random_box(law, draws, width, height), size
    elif isinstance(law, CenterBox):
        box, full = (0, 0, width, height), _resized(law.shorter, width, height)
        window = (_offset(full[1], size[1]), _offset(full[0], size[0]), size[1], size[0])
    elif isinstance(law, WholeBox):
        box, full = (0, 0, width, height), size
    else:
        assert_never(law)
    return Geometry(box, next(draws) < recipe.flip, full, window)


def _uniforms(key: int) -> Iterator[float]:
    while True:
        key = key + _GOLDEN & _MASK64
        z = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
        yield ((z ^ z >> 31) >> 11) * 2.0**-53


def _random_box(law: RandomBox, draws: Iterator[float], width: int, height: int) -> Box:
    """As torchvision's `RandomResizedCrop.get_params`, the draws apart."""
    area = float(width * height)
    low, high = math.log(law.ratio[0]), math.log(law.ratio[1])
    for _ in range(_ATTEMPTS):
        wanted = area * (law.scale[0] + (law.scale[1] - law.scale[0]) * next(draws))
        ratio = math.exp(low + (high - low) * next(draws))
        w, h = round(math.sqrt(wanted * ratio)), round(math.sqrt(wanted / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(next(draws) * (width - w + 1)), int(next(draws) * (height - h + 1)), w, h
    w, h = width, height
    if width / height < law.ratio[0]:
        h = max(1, round(width / law.ratio[0]))
    elif width / height > law.ratio[1]:
        w = max(1, round(height * law.ratio[1]))
    return (width - w) // 2, (height - h) // 2, w, h


def _resized(shorter: int, width: int, height: int) -> tuple[int, int]:
    """(height, width) after torchvision's `Resize(shorter)`, which cuts the longer side down to whole pixels."""
    if width <= height:
        return shorter * height // width, shorter
    return shorter, shorter * width // height


def _offset(full: int, size: int) -> int:
    """Where `CenterCrop` begins; negative is its padding, of which the smaller half comes first."""
    return round((full - size) / 2) if full >= size else -((size - full) // 2)
