"""A part of a picture that may reach beyond its edges, without padding the whole picture first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feedline.transforms.pictures import Picture

MODES = ("constant", "edge", "reflect", "symmetric")


@dataclass(frozen=True, slots=True)
class Border:
    """What lies beyond the edges: `np.pad`'s modes, and for "constant" a level, or one per channel."""

    mode: str = "constant"
    fill: int | tuple[int, ...] = 0


def cut(picture: Picture, top: int, left: int, size: tuple[int, int], border: Border) -> Picture:
    """The part of `size` (height, width) that begins at (top, left), in memory of its own."""
    height, width = size
    if border.mode == "constant":
        return _filled(picture, top, left, size, border.fill)
    rows = _folded(np.arange(top, top + height), picture.shape[0], border.mode)
    columns = _folded(np.arange(left, left + width), picture.shape[1], border.mode)
    part: Picture = picture[rows[:, None], columns]
    return part


def _filled(picture: Picture, top: int, left: int, size: tuple[int, int], fill: int | tuple[int, ...]) -> Picture:
    height, width = size
    inside = picture[max(0, top) : max(0, top + height), max(0, left) : max(0, left + width)]
    if inside.shape[:2] == size:
        return inside.copy()
    out = np.empty((height, width, picture.shape[2]), np.uint8)
    out[...] = fill
    y, x = max(0, -top), max(0, -left)
    out[y : y + inside.shape[0], x : x + inside.shape[1]] = inside
    return out


def _folded(places: NDArray[np.int64], length: int, mode: str) -> NDArray[np.int64]:
    """Places on an endless line, folded back onto `range(length)`."""
    if mode == "edge" or length == 1:
        return places.clip(0, length - 1)
    period = 2 * length if mode == "symmetric" else 2 * length - 2
    places = places % period
    return np.minimum(places, period - places - (mode == "symmetric"))
