"""Crop policies, and the geometry that they choose for an image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from feedline.core.rng import Draws
from feedline.errors import ArgumentError

Box = tuple[int, int, int, int]
"""x, y, width, height."""


Size = tuple[int, int]
"""Height, width."""


Pixels = NDArray[np.uint8]
"""Read-only or writable pixels, (height, width, 3).

Pixels of the kernels are views of bytes, which Pillow's `tobytes` then returns without a copy.
"""


_LARGEST = 65_500
"""Limit of pixels along one side of an output: the limit of JPEG, small enough for every product in the kernels."""


_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class Geometry:
    """Mapping from the pixels of an image to a row's pixels.

    The pixels of `box` (x, y, width, height) are resized to `full` (height, width); no other pixel is read. The row
    shows the part `window` (x, y, width, height) of the result, mirrored if `flip`. Pixels of the window outside of
    `full` are zero.
    """

    box: Box
    flip: bool
    full: Size
    window: Box


@dataclass(frozen=True, slots=True)
class RandomBox:
    """Random part of the image: torchvision's `RandomResizedCrop`.

    `scale` bounds the share of the image's area, `ratio` the width divided by the height. After ten parts that do not
    fit, it is the largest central part within `ratio`.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    kernel_kind: ClassVar[int] = 0
    is_random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, pair in (("scale", self.scale), ("ratio", self.ratio)):
            object.__setattr__(self, name, _check_increasing(name, pair))

    @property
    def kernel_bounds(self) -> tuple[float, float, float, float]:
        return (*self.scale, *self.ratio)

    def place(self, size: Size, width: int, height: int, rng: Draws) -> Geometry:
        """Draw the box as torchvision's `RandomResizedCrop.get_params` does, with other random numbers."""
        return Geometry(self._draw_box(width, height, rng), False, size, (0, 0, size[1], size[0]))

    def _draw_box(self, width: int, height: int, rng: Draws) -> Box:
        # Every operation and draw has its counterpart in native/image/geometry.cpp. Both give the same bits.
        area = float(width * height)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            target = area * rng.between(*self.scale)
            ratio = math.exp(rng.between(low, high))
            w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
            if 0 < w <= width and 0 < h <= height:
                return rng.below(width - w + 1), rng.below(height - h + 1), w, h
        w, h = width, height
        if width / height < self.ratio[0]:
            h = max(1, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            w = max(1, round(height * self.ratio[1]))
        return (width - w) // 2, (height - h) // 2, w, h


@dataclass(frozen=True, slots=True)
class CenterBox:
    """Center of the image: `Resize(shorter)` and `CenterCrop(size)` as one resampling.

    Only the pixels in the window are computed. Sizes round as torchvision's do; if the resized image is smaller than
    `size`, zeros surround it.
    """

    shorter: int

    kernel_kind: ClassVar[int] = 1
    is_random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shorter", check_side("CenterBox.shorter", self.shorter))

    @property
    def kernel_bounds(self) -> tuple[float, float, float, float]:
        return (self.shorter, 0, 0, 0)

    def place(self, size: Size, width: int, height: int, rng: Draws) -> Geometry:  # noqa: ARG002 - not random
        # Like torchvision's Resize(shorter), which truncates the longer side to whole pixels.
        if width <= height:
            full = self.shorter * height // width, self.shorter
        else:
            full = self.shorter, self.shorter * width // height
        window = (center_offset(full[1], size[1]), center_offset(full[0], size[0]), size[1], size[0])
        return Geometry((0, 0, width, height), False, full, window)


@dataclass(frozen=True, slots=True)
class WholeBox:
    """Whole image, resized to `size` without keeping its aspect ratio."""

    kernel_kind: ClassVar[int] = 2
    is_random: ClassVar[bool] = False

    @property
    def kernel_bounds(self) -> tuple[float, float, float, float]:
        return (0, 0, 0, 0)

    def place(self, size: Size, width: int, height: int, rng: Draws) -> Geometry:  # noqa: ARG002 - not random
        return Geometry((0, 0, width, height), False, size, (0, 0, size[1], size[0]))


CropPolicy = RandomBox | CenterBox | WholeBox
"""Each kind has the number `kernel_kind` in `enum class Kind` of native/image/geometry.h."""


def center_offset(full: int, size: int) -> int:
    """Start of torchvision's `CenterCrop`; negative for padding.

    The smaller half of the padding comes first.
    """
    return round((full - size) / 2) if full >= size else -((size - full) // 2)


def check_floats(name: str, values: Any, count: int) -> tuple[float, ...]:
    numbers = check_numbers(name, values, count)
    try:
        return tuple(map(float, numbers))
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{name} must be {count} numbers, not {values!r}") from None


def check_numbers(name: str, values: Any, count: int) -> tuple[Any, ...]:
    try:
        numbers = tuple(values)
    except TypeError:
        numbers = ()
    if len(numbers) != count:
        raise ArgumentError(f"{name} must be {count} numbers, not {values!r}")
    return numbers


def check_side(name: str, value: Any) -> int:
    try:
        pixels = int(value)
    except (TypeError, ValueError, OverflowError):
        pixels = 0
    if value != pixels or not 1 <= pixels <= _LARGEST:
        raise ArgumentError(f"{name} must be a whole number of pixels from 1 to {_LARGEST:,}; got {value!r}")
    return pixels


def _check_increasing(name: str, pair: Any) -> tuple[float, float]:
    low, high = check_floats(f"RandomBox.{name}", pair, 2)
    if not 0 < low <= high < math.inf:
        raise ArgumentError(f"RandomBox.{name} must be two positive numbers, the smaller first; got {pair!r}")
    return low, high
