"""Changes of colour and sharpness, with torchvision's names, arguments and laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.errors import SampleError
from feedline.transforms import arguments, levels
from feedline.transforms.arguments import Interval, Size, settle
from feedline.transforms.draws import Draws
from feedline.transforms.forms import Form
from feedline.transforms.pictures import Picture
from feedline.transforms.transform import Pixelwise

Factor = float | Sequence[float]


@dataclass(frozen=True, slots=True, init=False)
class ColorJitter(Pixelwise):
    """Brightness, contrast, saturation and hue changed by random factors, in random order, as Pillow does each.

    A number `x` stands for factors uniform in [max(0, 1 - x), 1 + x], for `hue` in [-x, x] (turns of the colour
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
        return levels.adjusted(picture, self.adjustments(Draws(key)))

    def adjustments(self, draws: Draws) -> list[tuple[int, float]]:
        """(which, factor) of those that change anything, in the order drawn."""
        order = draws.order(4)
        factors = [draws.between(*bounds) for bounds in (self.brightness, self.contrast, self.saturation, self.hue)]
        return [(which, factors[which]) for which in order if factors[which] != levels.NEUTRAL[which]]


@dataclass(frozen=True, slots=True, init=False)
class Grayscale(Pixelwise):
    """Without colour: ITU-R 601 luma, in one channel or three equal ones."""

    num_output_channels: int

    def __init__(self, num_output_channels: int = 1) -> None:
        settle(self, num_output_channels=arguments.one_of(self, "num_output_channels", num_output_channels, (1, 3)))

    @property
    def draws(self) -> bool:
        return False

    def change(self, picture: Picture, key: int) -> Picture:  # noqa: ARG002 - nothing is drawn
        grey = _grey(picture)[:, :, :1]
        return np.ascontiguousarray(grey) if self.num_output_channels == 1 else np.repeat(grey, 3, axis=2)

    def follow(self, form: Form | None) -> Form | None:
        return form and replace(form, channels=self.num_output_channels)


@dataclass(frozen=True, slots=True, init=False)
class RandomGrayscale(Pixelwise):
    """Without colour, in as many channels as before, with probability `p`."""

    p: float

    def __init__(self, p: float = 0.1) -> None:
        settle(self, p=arguments.probability(self, "p", p))

    def change(self, picture: Picture, key: int) -> Picture:
        return _grey(picture) if Draws(key).unit() < self.p else picture


@dataclass(frozen=True, slots=True, init=False)
class GaussianBlur(Pixelwise):
    """Blurred with a kernel of `kernel_size` pixels (odd; one number or (x, y)) and a sigma uniform in `sigma`."""

    kernel_size: tuple[int, int]
    sigma: Interval

    def __init__(self, kernel_size: Size, sigma: Factor = (0.1, 2.0)) -> None:
        settle(
            self,
            kernel_size=arguments.area(self, "kernel_size", kernel_size),
            sigma=arguments.positive_interval(self, "sigma", (sigma, sigma) if _is_number(sigma) else sigma),
        )
        if any(size % 2 == 0 for size in self.kernel_size):
            raise arguments.refusal(self, "kernel_size", kernel_size, "give odd numbers: a kernel has a middle")

    def change(self, picture: Picture, key: int) -> Picture:
        wide, tall = self.kernel_size
        if wide // 2 >= picture.shape[1] or tall // 2 >= picture.shape[0]:
            raise SampleError(
                f"{self} reaches beyond a picture of {picture.shape[0]} × {picture.shape[1]} pixels (height × width):"
                " resize before, or take a smaller kernel_size"
            )
        sigma = Draws(key).between(*self.sigma)
        return levels.blurred(picture, _bell(wide, sigma), _bell(tall, sigma))


def _bell(size: int, sigma: float) -> NDArray[np.float32]:
    places = np.arange(size) - size // 2
    weights = np.exp(-0.5 * (places / sigma) ** 2)
    return np.asarray(weights / weights.sum(), np.float32)


def _grey(picture: Picture) -> Picture:
    return levels.adjusted(picture, [(levels.SATURATION, 0.0)])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _factors(owner: ColorJitter, argument: str, value: Any) -> Interval:
    if _is_number(value):
        if not 0 <= value < math.inf:
            raise arguments.refusal(owner, argument, value, "a single number is at or above 0")
        value = (max(0.0, 1.0 - value), 1.0 + value)
    return arguments.interval(owner, argument, value)


def _turns(owner: ColorJitter, value: Any) -> Interval:
    if _is_number(value):
        if not 0 <= value <= 0.5:
            raise arguments.refusal(owner, "hue", value, "a single number lies between 0 and 0.5")
        value = (-value, value)
    return arguments.interval(owner, "hue", value, -0.5, 0.5)
