"""Changes of color and sharpness, with torchvision's names, arguments and laws.

Arithmetic on levels: the native kernels where they were built, else Pillow, whose results they equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from feedline.core import kernels
from feedline.errors import SampleError
from feedline.transforms import _arguments
from feedline.transforms._arguments import Interval, Size, settle
from feedline.transforms._random import Draws
from feedline.transforms.base import Pixelwise
from feedline.transforms.inputs import Picture
from feedline.transforms.steps import ImageSpec

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
"""Torchvision's numbers of the four; as `enum class Adjustment` in native/image/color.h."""


NEUTRAL = (1.0, 1.0, 1.0, 0.0)
"""The factors that change nothing."""


_ENHANCERS = {
    BRIGHTNESS: ImageEnhance.Brightness,
    CONTRAST: ImageEnhance.Contrast,
    SATURATION: ImageEnhance.Color,
}


_native: Any = kernels.native if hasattr(kernels.native, "adjust_colors") else None


def adjusted(picture: Picture, adjustments: list[tuple[int, float]]) -> Picture:
    """Brightness, contrast, saturation and hue, changed one after the other by (which, factor)."""
    if picture.shape[2] == 1:  # gray has neither saturation nor hue
        adjustments = [(which, factor) for which, factor in adjustments if which in (BRIGHTNESS, CONTRAST)]
    if not adjustments:
        return picture
    if _native is None:
        return _through_pillow(picture, adjustments)
    out = np.array(picture, order="C")
    _native.adjust_colors(out, adjustments)
    return out


def blurred(picture: Picture, kernel_x: NDArray[np.float32], kernel_y: NDArray[np.float32]) -> Picture:
    """Every level replaced by the weighted mean around it, mirrored at the edges; rounded, at ties to even levels."""
    across, down = len(kernel_x) // 2, len(kernel_y) // 2
    padded = np.pad(picture, ((down, down), (across, across), (0, 0)), "reflect")
    if _native is not None:
        out = np.empty_like(picture, order="C")
        _native.blur_picture(np.ascontiguousarray(padded), kernel_x.tolist(), kernel_y.tolist(), out)
        return out
    return _rounded(_weighted(_weighted(padded.astype(np.float32), kernel_x, 1), kernel_y, 0))


def _through_pillow(picture: Picture, adjustments: list[tuple[int, float]]) -> Picture:
    image = Image.fromarray(picture if picture.shape[2] == 3 else picture[:, :, 0])
    for which, factor in adjustments:
        image = _turned(image, factor) if which == HUE else _ENHANCERS[which](image).enhance(factor)
    return np.array(image).reshape(picture.shape)


def _turned(image: Image.Image, share: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    turn = np.uint8(int(share * 255) % 256)
    hue = Image.fromarray(np.asarray(hue) + turn)
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def _weighted(levels: NDArray[np.float32], kernel: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """Sums of shifted copies, in the order in which the native kernel adds them."""
    length = levels.shape[axis] - len(kernel) + 1
    shifted = (levels.take(range(at, at + length), axis) for at in range(len(kernel)))
    total = np.zeros_like(levels.take(range(length), axis))
    for weight, part in zip(kernel, shifted, strict=True):
        total += weight * part
    return total


def _rounded(levels: NDArray[np.float32]) -> Picture:
    return np.rint(levels).clip(0, 255).astype(np.uint8)


Factor = float | Sequence[float]


@dataclass(frozen=True, slots=True, init=False)
class ColorJitter(Pixelwise):
    """Brightness, contrast, saturation and hue changed by random factors, in random order, as Pillow does each.

    A number `x` stands for factors uniform in [max(0, 1 - x), 1 + x], for `hue` in [-x, x] (turns of the color
    circle, at most half a one); two numbers are the bounds themselves.
    """

    brightness: Interval
    contrast: Interval
    saturation: Interval
    hue: Interval

    def __init__(self, brightness: Factor = 0, contrast: Factor = 0, saturation: Factor = 0, hue: Factor = 0) -> None:
        settle(
            self,
            brightness=_factors(self, "brightness", brightness),
            contrast=_factors(self, "contrast", contrast),
            saturation=_factors(self, "saturation", saturation),
            hue=_turns(self, hue),
        )

    def change(self, picture: Picture, key: int) -> Picture:
        return adjusted(picture, self.adjustments(Draws(key)))

    def adjustments(self, draws: Draws) -> list[tuple[int, float]]:
        """(which, factor) of those that change anything, in the order drawn."""
        order = draws.order(4)
        factors = [draws.between(*bounds) for bounds in (self.brightness, self.contrast, self.saturation, self.hue)]
        return [(which, factors[which]) for which in order if factors[which] != NEUTRAL[which]]


@dataclass(frozen=True, slots=True, init=False)
class Grayscale(Pixelwise):
    """Without color: ITU-R 601 luma, in one channel or three equal ones."""

    num_output_channels: int

    def __init__(self, num_output_channels: int = 1) -> None:
        settle(self, num_output_channels=_arguments.one_of(self, "num_output_channels", num_output_channels, (1, 3)))

    @property
    def draws(self) -> bool:
        return False

    def change(self, picture: Picture, key: int) -> Picture:  # noqa: ARG002 - nothing is drawn
        gray = _gray(picture)[:, :, :1]
        return np.ascontiguousarray(gray) if self.num_output_channels == 1 else np.repeat(gray, 3, axis=2)

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        return form and replace(form, channels=self.num_output_channels)


@dataclass(frozen=True, slots=True, init=False)
class RandomGrayscale(Pixelwise):
    """Without color, in as many channels as before, with probability `p`."""

    p: float

    def __init__(self, p: float = 0.1) -> None:
        settle(self, p=_arguments.probability(self, "p", p))

    def change(self, picture: Picture, key: int) -> Picture:
        return _gray(picture) if Draws(key).unit() < self.p else picture


@dataclass(frozen=True, slots=True, init=False)
class GaussianBlur(Pixelwise):
    """Blurred with a kernel of `kernel_size` pixels (odd; one number or (x, y)) and a sigma uniform in `sigma`."""

    kernel_size: tuple[int, int]
    sigma: Interval

    def __init__(self, kernel_size: Size, sigma: Factor = (0.1, 2.0)) -> None:
        settle(
            self,
            kernel_size=_arguments.area(self, "kernel_size", kernel_size),
            sigma=_arguments.positive_interval(self, "sigma", (sigma, sigma) if _is_number(sigma) else sigma),
        )
        if any(size % 2 == 0 for size in self.kernel_size):
            raise _arguments.refusal(self, "kernel_size", kernel_size, "give odd numbers: a kernel has a middle")

    def change(self, picture: Picture, key: int) -> Picture:
        wide, tall = self.kernel_size
        if wide // 2 >= picture.shape[1] or tall // 2 >= picture.shape[0]:
            raise SampleError(
                f"{self} reaches beyond a picture of {picture.shape[0]} × {picture.shape[1]} pixels (height × width):"
                " resize before, or take a smaller kernel_size"
            )
        sigma = Draws(key).between(*self.sigma)
        return blurred(picture, _bell(wide, sigma), _bell(tall, sigma))


def _bell(size: int, sigma: float) -> NDArray[np.float32]:
    places = np.arange(size) - size // 2
    weights = np.exp(-0.5 * (places / sigma) ** 2)
    return np.asarray(weights / weights.sum(), np.float32)


def _gray(picture: Picture) -> Picture:
    return adjusted(picture, [(SATURATION, 0.0)])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _factors(owner: ColorJitter, argument: str, value: Any) -> Interval:
    if _is_number(value):
        if not 0 <= value < math.inf:
            raise _arguments.refusal(owner, argument, value, "a single number is at or above 0")
        value = (max(0.0, 1.0 - value), 1.0 + value)
    return _arguments.interval(owner, argument, value)


def _turns(owner: ColorJitter, value: Any) -> Interval:
    if _is_number(value):
        if not 0 <= value <= 0.5:
            raise _arguments.refusal(owner, "hue", value, "a single number lies between 0 and 0.5")
        value = (-value, value)
    return _arguments.interval(owner, "hue", value, -0.5, 0.5)
