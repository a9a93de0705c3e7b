"""Color and blur transforms, with torchvision's names, arguments and distributions.

The native kernels do the arithmetic where they were built, else Pillow and NumPy, with equal results.
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
from feedline.core.rng import Draws
from feedline.errors import SampleError
from feedline.transforms import _arguments
from feedline.transforms._arguments import Interval, SizeArgument, init_frozen
from feedline.transforms.base import Transform
from feedline.transforms.inputs import ImageLevels
from feedline.transforms.steps import ImageSpec

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
"""Torchvision's numbers of the adjustments; equal to `enum class Adjustment` in native/image/color.h."""


NEUTRAL = (1.0, 1.0, 1.0, 0.0)
"""Factor of each adjustment that changes nothing."""


_ENHANCERS = {
    BRIGHTNESS: ImageEnhance.Brightness,
    CONTRAST: ImageEnhance.Contrast,
    SATURATION: ImageEnhance.Color,
}


_native: Any = kernels.native if hasattr(kernels.native, "adjust_colors") else None


def adjust(image: ImageLevels, adjustments: list[tuple[int, float]]) -> ImageLevels:
    """Apply adjustments of color, each (which, factor), in order.

    Returns a new array, or `image` itself if nothing is to change.
    """
    if image.shape[2] == 1:  # gray has neither saturation nor hue
        adjustments = [(which, factor) for which, factor in adjustments if which in (BRIGHTNESS, CONTRAST)]
    if not adjustments:
        return image
    if _native is None:
        return _adjust_pillow(image, adjustments)
    out = np.array(image, order="C")
    _native.adjust_colors(out, adjustments)
    return out


def blur(image: ImageLevels, kernel_x: NDArray[np.float32], kernel_y: NDArray[np.float32]) -> ImageLevels:
    """Convolve with a separable kernel.

    Edges reflect; results are rounded half to even.
    """
    across, down = len(kernel_x) // 2, len(kernel_y) // 2
    padded = np.pad(image, ((down, down), (across, across), (0, 0)), "reflect")
    if _native is not None:
        out = np.empty_like(image, order="C")
        _native.blur_image(np.ascontiguousarray(padded), kernel_x.tolist(), kernel_y.tolist(), out)
        return out
    return _round(_convolve(_convolve(padded.astype(np.float32), kernel_x, 1), kernel_y, 0))


def _adjust_pillow(array: ImageLevels, adjustments: list[tuple[int, float]]) -> ImageLevels:
    image = Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0])
    for which, factor in adjustments:
        image = _rotate_hue(image, factor) if which == HUE else _ENHANCERS[which](image).enhance(factor)
    return np.array(image).reshape(array.shape)


def _rotate_hue(image: Image.Image, share: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    turn = np.uint8(int(share * 255) % 256)
    hue = Image.fromarray(np.asarray(hue) + turn)
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def _convolve(levels: NDArray[np.float32], kernel: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    # Sums of shifted copies, added in the order of the native kernel: float32 sums depend on it.
    length = levels.shape[axis] - len(kernel) + 1
    shifted = (levels.take(range(at, at + length), axis) for at in range(len(kernel)))
    total = np.zeros_like(levels.take(range(length), axis))
    for weight, part in zip(kernel, shifted, strict=True):
        total += weight * part
    return total


def _round(levels: NDArray[np.float32]) -> ImageLevels:
    return np.rint(levels).clip(0, 255).astype(np.uint8)


Factor = float | Sequence[float]


@dataclass(frozen=True, slots=True, init=False)
class ColorJitter(Transform):
    """Brightness, contrast, saturation and hue changed by random factors, in random order.

    Each change is Pillow's. A number `x` stands for factors uniform in [max(0, 1 - x), 1 + x], for `hue` in [-x, x]
    (turns of the color circle, at most 0.5); two numbers are the bounds themselves.
    """

    brightness: Interval
    contrast: Interval
    saturation: Interval
    hue: Interval

    def __init__(self, brightness: Factor = 0, contrast: Factor = 0, saturation: Factor = 0, hue: Factor = 0) -> None:
        init_frozen(
            self,
            brightness=_check_factors(self, "brightness", brightness),
            contrast=_check_factors(self, "contrast", contrast),
            saturation=_check_factors(self, "saturation", saturation),
            hue=_check_hue(self, hue),
        )

    def apply(self, image: ImageLevels, rng: Draws) -> ImageLevels:
        return adjust(image, self.adjustments(rng))

    def adjustments(self, rng: Draws) -> list[tuple[int, float]]:
        """Draw the order and factors of the changes, as (which, factor)."""
        order = rng.permutation(4)
        factors = [rng.between(*bounds) for bounds in (self.brightness, self.contrast, self.saturation, self.hue)]
        return [(which, factors[which]) for which in order if factors[which] != NEUTRAL[which]]


@dataclass(frozen=True, slots=True, init=False)
class Grayscale(Transform):
    """Grayscale image: ITU-R 601 luma, in one channel or three equal ones."""

    num_output_channels: int

    def __init__(self, num_output_channels: int = 1) -> None:
        init_frozen(
            self, num_output_channels=_arguments.check_choice(self, "num_output_channels", num_output_channels, (1, 3))
        )

    @property
    def is_random(self) -> bool:
        return False

    def apply(self, image: ImageLevels, rng: Draws) -> ImageLevels:  # noqa: ARG002 - not random
        gray = _to_gray(image)[:, :, :1]
        return np.ascontiguousarray(gray) if self.num_output_channels == 1 else np.repeat(gray, 3, axis=2)

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        return spec and replace(spec, channels=self.num_output_channels)


@dataclass(frozen=True, slots=True, init=False)
class RandomGrayscale(Transform):
    """Grayscale image with as many channels as before, with probability `p`."""

    p: float

    def __init__(self, p: float = 0.1) -> None:
        init_frozen(self, p=_arguments.check_probability(self, "p", p))

    def apply(self, image: ImageLevels, rng: Draws) -> ImageLevels:
        return _to_gray(image) if rng.unit() < self.p else image


@dataclass(frozen=True, slots=True, init=False)
class GaussianBlur(Transform):
    """Gaussian blur by `kernel_size` pixels (odd; one number or (x, y)).

    Its sigma is uniform in `sigma`, or equal to it if that is one number. An image that is too small for the kernel
    raises SampleError.
    """

    kernel_size: tuple[int, int]
    sigma: Interval

    def __init__(self, kernel_size: SizeArgument, sigma: Factor = (0.1, 2.0)) -> None:
        init_frozen(
            self,
            kernel_size=_arguments.check_size(self, "kernel_size", kernel_size),
            sigma=_arguments.check_positive_interval(self, "sigma", (sigma, sigma) if _is_number(sigma) else sigma),
        )
        if any(size % 2 == 0 for size in self.kernel_size):
            raise _arguments.argument_error(
                self, "kernel_size", kernel_size, "give odd numbers: a kernel has a center pixel"
            )

    def apply(self, image: ImageLevels, rng: Draws) -> ImageLevels:
        self.check_size(*image.shape[:2])
        wide, tall = self.kernel_size
        sigma = rng.between(*self.sigma)
        return blur(image, gaussian(wide, sigma), gaussian(tall, sigma))

    def check_size(self, height: int, width: int) -> None:
        """Raise SampleError for an image that is too small for the kernel."""
        wide, tall = self.kernel_size
        if wide // 2 >= width or tall // 2 >= height:
            raise SampleError(
                f"{self} reaches beyond an image of {height} × {width} pixels (height × width):"
                " resize before, or take a smaller kernel_size"
            )


def gaussian(size: int, sigma: float) -> NDArray[np.float32]:
    distances = np.arange(size) - size // 2
    weights = np.exp(-0.5 * (distances / sigma) ** 2)
    return np.asarray(weights / weights.sum(), np.float32)


def _to_gray(image: ImageLevels) -> ImageLevels:
    return adjust(image, [(SATURATION, 0.0)])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_factors(transform: ColorJitter, argument: str, value: Any) -> Interval:
    if _is_number(value):
        if not 0 <= value < math.inf:
            raise _arguments.argument_error(transform, argument, value, "a single number is at or above 0")
        value = (max(0.0, 1.0 - value), 1.0 + value)
    return _arguments.check_interval(transform, argument, value)


def _check_hue(transform: ColorJitter, value: Any) -> Interval:
    if _is_number(value):
        if not 0 <= value <= 0.5:
            raise _arguments.argument_error(transform, "hue", value, "a single number lies between 0 and 0.5")
        value = (-value, value)
    return _arguments.check_interval(transform, "hue", value, -0.5, 0.5)
