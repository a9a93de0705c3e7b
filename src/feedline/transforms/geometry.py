"""Crops, resizes and flips, with torchvision's names, arguments and distributions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.core.rng import Draws
from feedline.errors import SampleError
from feedline.images import CenterBox, RandomBox, Recipe
from feedline.images.crops import center_offset
from feedline.transforms import _arguments
from feedline.transforms._arguments import Interval, SizeArgument, init_frozen
from feedline.transforms.base import Transform
from feedline.transforms.inputs import ImageLevels
from feedline.transforms.native_steps import ResizeShortest, Window, resize_recipe
from feedline.transforms.steps import ImageSpec, PlannedStep, Step, register_fusion

PADDING_MODES = ("constant", "edge", "reflect", "symmetric")
"""Modes of `np.pad`."""


@dataclass(frozen=True, slots=True, init=False)
class RandomResizedCrop(Transform):
    """Random part of the image, resized to `size` with antialiasing.

    The part has a share of the area uniform in `scale` and a width-to-height ratio log-uniform in `ratio`. After ten
    parts that do not fit, it is the largest central one. `interpolation` is "bilinear" or "bicubic". `scaled_decode`
    as in `images.Recipe`.
    """

    size: tuple[int, int]
    scale: Interval
    ratio: Interval
    interpolation: str
    scaled_decode: bool

    def __init__(
        self,
        size: SizeArgument,
        scale: Interval = (0.08, 1.0),
        ratio: Interval = (3 / 4, 4 / 3),
        interpolation: str = "bilinear",
        *,
        scaled_decode: bool = False,
    ) -> None:
        init_frozen(
            self,
            size=_arguments.check_size(self, "size", size),
            scale=_arguments.check_positive_interval(self, "scale", scale),
            ratio=_arguments.check_positive_interval(self, "ratio", ratio),
            interpolation=_arguments.check_interpolation(self, interpolation),
            scaled_decode=bool(scaled_decode),
        )

    def lower(self) -> Step:
        box = RandomBox(self.scale, self.ratio)
        recipe = Recipe(self.size, box, interpolation=self.interpolation, scaled_decode=self.scaled_decode)
        return Window(recipe)


@dataclass(frozen=True, slots=True, init=False)
class Resize(Transform):
    """Whole image resized: its shorter side to `size`, or both sides.

    `size` is a number of pixels, or (height, width). `interpolation` and `scaled_decode` are as in `images.Recipe`.
    """

    size: int | tuple[int, int]
    interpolation: str
    scaled_decode: bool

    def __init__(self, size: SizeArgument, interpolation: str = "bilinear", *, scaled_decode: bool = False) -> None:
        sides = _arguments.check_size(self, "size", size)
        init_frozen(
            self,
            size=sides if not isinstance(size, int) and len(size) == 2 else sides[0],
            interpolation=_arguments.check_interpolation(self, interpolation),
            scaled_decode=bool(scaled_decode),
        )

    def lower(self) -> Step:
        if isinstance(self.size, tuple):
            return Window(resize_recipe(self.size, self.interpolation, self.scaled_decode))
        return ResizeShortest(self.size, self.interpolation, self.scaled_decode)


@dataclass(frozen=True, slots=True, init=False)
class CenterCrop(Transform):
    """Central part of `size`, padded with zeros if the image is smaller."""

    size: tuple[int, int]

    def __init__(self, size: SizeArgument) -> None:
        init_frozen(self, size=_arguments.check_size(self, "size", size))

    @property
    def is_random(self) -> bool:
        return False

    def apply(self, image: ImageLevels, rng: Draws) -> ImageLevels:  # noqa: ARG002 - not random
        top, left = (center_offset(length, side) for length, side in zip(image.shape, self.size, strict=False))
        return _crop_filled(image, top, left, self.size, 0)

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        return spec and replace(spec, size=self.size)


@dataclass(frozen=True, slots=True, init=False)
class RandomCrop(Transform):
    """Random part of `size`, with optional padding around the image.

    `padding` is one number, (x, y) or (left, top, right, bottom). `pad_if_needed` pads images that are too small, on
    both sides, by the pixels they lack; without it they raise SampleError. Padding is `fill` (a level, or one per
    channel), or for `padding_mode` "edge", "reflect" and "symmetric" made from the image as by `np.pad`.
    """

    size: tuple[int, int]
    padding: tuple[int, int, int, int] | None
    pad_if_needed: bool
    fill: int | tuple[int, ...]
    padding_mode: str

    def __init__(
        self,
        size: SizeArgument,
        padding: SizeArgument | None = None,
        pad_if_needed: bool = False,
        fill: int | tuple[int, ...] = 0,
        padding_mode: str = "constant",
    ) -> None:
        init_frozen(
            self,
            size=_arguments.check_size(self, "size", size),
            padding=None if padding is None else _arguments.check_padding(self, "padding", padding),
            pad_if_needed=bool(pad_if_needed),
            fill=_arguments.check_levels(self, "fill", fill),
            padding_mode=_arguments.check_choice(self, "padding_mode", padding_mode, PADDING_MODES),
        )

    def apply(self, image: ImageLevels, rng: Draws) -> ImageLevels:
        top, left = self.corner(rng, *image.shape[:2])
        if self.padding_mode == "constant":
            return _crop_filled(image, top, left, self.size, self.levels(image.shape[2]))
        return _crop_folded(image, top, left, self.size, self.padding_mode)

    def levels(self, channels: int) -> tuple[int, ...]:
        """Levels of `fill`, one or one per channel; otherwise SampleError."""
        levels = self.fill if isinstance(self.fill, tuple) else (self.fill,)
        if len(levels) not in (1, channels):
            raise SampleError(
                f"{self} has {len(levels)} levels in fill, but the image has {channels} channel(s): give one level, or"
                " make the image RGB with Grayscale(num_output_channels=3) before"
            )
        return levels

    def corner(self, rng: Any, height: int, width: int) -> tuple[Any, Any]:
        """Draw top and left of the part; negative within the padding.

        Returns numbers for `Draws`, and int64 arrays for `DrawsEach`. Raises SampleError for too small an image.
        """
        left, top, right, bottom = self._total_padding(height, width)
        tall, wide = height + top + bottom, width + left + right
        if tall < self.size[0] or wide < self.size[1]:
            raise SampleError(
                f"{self} needs more than an image of {height} × {width} pixels (height × width):"
                " pass pad_if_needed=True, or resize before"
            )
        y, x = rng.below(tall - self.size[0] + 1), rng.below(wide - self.size[1] + 1)
        return y - top, x - left

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        return spec and replace(spec, size=self.size)

    def _total_padding(self, height: int, width: int) -> tuple[int, int, int, int]:
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
        init_frozen(self, p=_arguments.check_probability(self, "p", p))

    def apply(self, image: ImageLevels, rng: Draws) -> ImageLevels:
        return image[:, ::-1].copy() if rng.unit() < self.p else image


@dataclass(frozen=True, slots=True, init=False)
class RandomVerticalFlip(Transform):
    """Top and bottom exchanged with probability `p`."""

    p: float

    def __init__(self, p: float = 0.5) -> None:
        init_frozen(self, p=_arguments.check_probability(self, "p", p))

    def apply(self, image: ImageLevels, rng: Draws) -> ImageLevels:
        return image[::-1].copy() if rng.unit() < self.p else image


def _crop_filled(
    image: ImageLevels, top: int, left: int, size: tuple[int, int], fill: int | tuple[int, ...]
) -> NDArray[np.uint8]:
    """Copy the part of `size` at (top, left), filled beyond the edges."""
    height, width = size
    # Only the part is allocated: padding the whole image first would copy all of it.
    inside = image[max(0, top) : max(0, top + height), max(0, left) : max(0, left + width)]
    if inside.shape[:2] == size:
        return inside.copy()
    out = np.empty((height, width, image.shape[2]), np.uint8)
    out[...] = fill
    y, x = max(0, -top), max(0, -left)
    out[y : y + inside.shape[0], x : x + inside.shape[1]] = inside
    return out


def _crop_folded(image: ImageLevels, top: int, left: int, size: tuple[int, int], mode: str) -> ImageLevels:
    """Copy the part of `size` at (top, left), repeated beyond the edges."""
    rows = fold(np.arange(top, top + size[0]), image.shape[0], mode)
    columns = fold(np.arange(left, left + size[1]), image.shape[1], mode)
    part: ImageLevels = image[rows[:, None], columns]
    return part


def fold(positions: NDArray[np.int64], length: int, mode: str) -> NDArray[np.int64]:
    """Map positions beyond the edges to `range(length)`, as `np.pad` does."""
    if mode == "edge" or length == 1:
        return positions.clip(0, length - 1)
    period = 2 * length if mode == "symmetric" else 2 * length - 2
    positions = positions % period
    return np.minimum(positions, period - positions - (mode == "symmetric"))


def _fuse_center_crop(before: PlannedStep, after: PlannedStep) -> PlannedStep:
    """Fuse a center crop into a resize of only the central part."""
    resize, crop = before.step, after.step
    assert isinstance(resize, ResizeShortest)
    assert isinstance(crop, CenterCrop)
    recipe = replace(resize_recipe(crop.size, resize.interpolation, resize.scaled_decode), crop=CenterBox(resize.side))
    return replace(before, step=Window(recipe))


def _fuse_flip(before: PlannedStep, after: PlannedStep) -> PlannedStep | None:
    """Fuse a flip into the window before it.

    None if the window flips or converts already. A window has one key. If its crop is random, the key is the crop's,
    and the flip takes the next number from it. Otherwise the key is the flip's.
    """
    window, flip = before.step, after.step
    assert isinstance(window, Window)
    assert isinstance(flip, RandomHorizontalFlip)
    if window.conversion is not None or window.recipe.flip:
        return None
    path = before.path if window.is_random else after.path
    return replace(before, path=path, step=Window(replace(window.recipe, flip=flip.p)))


register_fusion(ResizeShortest, CenterCrop, _fuse_center_crop)
register_fusion(Window, RandomHorizontalFlip, _fuse_flip)
