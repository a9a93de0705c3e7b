"""Crops, resizes and flips, with torchvision's names, arguments and laws."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from feedline.errors import SampleError
from feedline.images import RandomBox, Recipe, WholeBox
from feedline.transforms import _arguments
from feedline.transforms._arguments import Interval, Size, settle
from feedline.transforms._random import Draws
from feedline.transforms.base import Pixelwise, Transform
from feedline.transforms.inputs import Picture
from feedline.transforms.native_steps import MODES, Border, CentralCrop, FlipStep, ResizeShortest, Window, cut
from feedline.transforms.steps import ImageSpec, Step


@dataclass(frozen=True, slots=True, init=False)
class RandomResizedCrop(Transform):
    """A random part of the picture, resized to `size` with antialiasing.

    The part has a share of the area uniform in `scale` and a width-to-height ratio log-uniform in `ratio`; after ten
    parts that do not fit, it is the largest central one. `interpolation` is "bilinear" or "bicubic".
    """

    size: tuple[int, int]
    scale: Interval
    ratio: Interval
    interpolation: str

    def __init__(
        self,
        size: Size,
        scale: Interval = (0.08, 1.0),
        ratio: Interval = (3 / 4, 4 / 3),
        interpolation: str = "bilinear",
    ) -> None:
        settle(
            self,
            size=_arguments.area(self, "size", size),
            scale=_arguments.positive_interval(self, "scale", scale),
            ratio=_arguments.positive_interval(self, "ratio", ratio),
            interpolation=_arguments.interpolation(self, interpolation),
        )

    def step(self) -> Step:
        return Window(Recipe(self.size, RandomBox(self.scale, self.ratio), interpolation=self.interpolation))


@dataclass(frozen=True, slots=True, init=False)
class Resize(Transform):
    """The whole picture: its shorter side resized to `size` pixels, or both to `size=(height, width)`."""

    size: int | tuple[int, int]
    interpolation: str

    def __init__(self, size: Size, interpolation: str = "bilinear") -> None:
        sides = _arguments.area(self, "size", size)
        settle(
            self,
            size=sides if not isinstance(size, int) and len(size) == 2 else sides[0],
            interpolation=_arguments.interpolation(self, interpolation),
        )

    def step(self) -> Step:
        if isinstance(self.size, tuple):
            return Window(Recipe(self.size, WholeBox(), interpolation=self.interpolation))
        return ResizeShortest(self.size, self.interpolation)


@dataclass(frozen=True, slots=True, init=False)
class CenterCrop(Transform):
    """The central part of `size`; zeros surround a picture that is smaller."""

    size: tuple[int, int]

    def __init__(self, size: Size) -> None:
        settle(self, size=_arguments.area(self, "size", size))

    def step(self) -> Step:
        return CentralCrop(self.size)


@dataclass(frozen=True, slots=True, init=False)
class RandomCrop(Pixelwise):
    """A random part of `size`, after `padding` was put around the picture: one number, (x, y) or (l, t, r, b).

    `pad_if_needed` widens pictures that are too small by what they lack, on both sides; without it they are refused.
    What is around the picture is `fill` (a level, or one per channel), or by `padding_mode` "edge", "reflect" or
    "symmetric" made from the picture.
    """

    size: tuple[int, int]
    padding: tuple[int, int, int, int] | None
    pad_if_needed: bool
    fill: int | tuple[int, ...]
    padding_mode: str

    def __init__(
        self,
        size: Size,
        padding: Size | None = None,
        pad_if_needed: bool = False,
        fill: int | tuple[int, ...] = 0,
        padding_mode: str = "constant",
    ) -> None:
        settle(
            self,
            size=_arguments.area(self, "size", size),
            padding=None if padding is None else _arguments.border(self, "padding", padding),
            pad_if_needed=bool(pad_if_needed),
            fill=_arguments.levels(self, "fill", fill),
            padding_mode=_arguments.one_of(self, "padding_mode", padding_mode, MODES),
        )

    def change(self, picture: Picture, key: int) -> Picture:
        left, top, right, bottom = self._around(*picture.shape[:2])
        height, width = picture.shape[0] + top + bottom, picture.shape[1] + left + right
        if height < self.size[0] or width < self.size[1]:
            raise SampleError(
                f"{self} needs more than a picture of {picture.shape[0]} × {picture.shape[1]} pixels (height × width):"
                " pass pad_if_needed=True, or resize before"
            )
        draws = Draws(key)
        y, x = draws.below(height - self.size[0] + 1), draws.below(width - self.size[1] + 1)
        return cut(picture, y - top, x - left, self.size, Border(self.padding_mode, self.fill))

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        return form and replace(form, size=self.size)

    def _around(self, height: int, width: int) -> tuple[int, int, int, int]:
        left, top, right, bottom = self.padding or (0, 0, 0, 0)
        if self.pad_if_needed:
            x, y = max(0, self.size[1] - width - left - right), max(0, self.size[0] - height - top - bottom)
            left, top, right, bottom = left + x, top + y, right + x, bottom + y
        return left, top, right, bottom


@dataclass(frozen=True, slots=True, init=False)
class RandomHorizontalFlip(Transform):
    """Left and right exchanged with probability `p`."""

    p: float

    def __init__(self, p: float = 0.5) -> None:
        settle(self, p=_arguments.probability(self, "p", p))

    def step(self) -> Step:
        return FlipStep(self.p)


@dataclass(frozen=True, slots=True, init=False)
class RandomVerticalFlip(Pixelwise):
    """Top and bottom exchanged with probability `p`."""

    p: float

    def __init__(self, p: float = 0.5) -> None:
        settle(self, p=_arguments.probability(self, "p", p))

    def change(self, picture: Picture, key: int) -> Picture:
        return np.ascontiguousarray(picture[::-1]) if Draws(key).unit() < self.p else picture


HorizontalFlip = RandomHorizontalFlip
