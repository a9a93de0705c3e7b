"""Recipes of the rows that images become."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch

from feedline.core.arguments import check_one_of
from feedline.core.rng import Draws, torch_keys
from feedline.errors import ArgumentError
from feedline.images.crops import CropPolicy, Geometry, check_floats, check_numbers, check_side

INTERPOLATIONS = ("bilinear", "bicubic")


LAYOUTS = ("HWC", "CHW")


DTYPES = (torch.uint8, torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Description of a row: crop, resize, flip and conversion to numbers.

    `layout` is "HWC" or "CHW", `dtype` uint8, float32 or bfloat16. `size` is (height, width); resizing is antialiased.
    `flip` is the probability of a horizontal flip. `interpolation` is "bilinear" or "bicubic", with Pillow's filters.
    uint8 rows hold the levels. float32 and bfloat16 rows hold `(level / 255 - mean) / std`, or `level / 255` if `mean`
    and `std` are None, computed in float32. With `apply_exif_orientation` the image is turned upright before the crop.
    Every pixel of the box is decoded. With `scaled_decode`, JPEGs are decoded at 1/2, 1/4 or 1/8 as long as the box
    stays at least twice as large as the output: faster for large images, but no longer Pillow's pixels.
    """

    size: tuple[int, int]
    crop: CropPolicy
    flip: float = 0.0
    interpolation: str = "bilinear"
    layout: str = "HWC"
    dtype: torch.dtype = torch.uint8
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    apply_exif_orientation: bool = False
    scaled_decode: bool = False

    def __post_init__(self) -> None:
        height, width = check_numbers("size", self.size, 2)
        object.__setattr__(self, "size", (check_side("size", height), check_side("size", width)))
        if not isinstance(self.crop, CropPolicy):
            raise ArgumentError(f"crop must be a RandomBox, CenterBox or WholeBox, not {self.crop!r}")
        if not _is_probability(self.flip):
            raise ArgumentError(f"flip must be a probability between 0 and 1, not {self.flip!r}")
        for name in ("apply_exif_orientation", "scaled_decode"):
            check_one_of(name, getattr(self, name), (True, False))
            object.__setattr__(self, name, bool(getattr(self, name)))
        for name, allowed in (("interpolation", INTERPOLATIONS), ("layout", LAYOUTS), ("dtype", DTYPES)):
            check_one_of(name, getattr(self, name), allowed)
        self._check_normalization()

    def _check_normalization(self) -> None:
        if self.mean is None and self.std is None:
            return
        if self.mean is None or self.std is None:
            raise ArgumentError("mean and std belong together: give both or neither")
        if self.dtype == torch.uint8:
            raise ArgumentError("mean and std need floats: pass dtype=torch.float32 or torch.bfloat16")
        for name in ("mean", "std"):
            object.__setattr__(self, name, check_floats(name, getattr(self, name), 3))
        with np.errstate(all="ignore"):  # rows are computed in float32: a number may become 0 or infinite there
            mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
            extremes = (np.array([[0], [1]], np.float32) - mean) / std
        for name, values, wrong in (
            ("mean", self.mean, ~np.isfinite(mean)),
            ("std", self.std, ~np.isfinite(std) | ~np.isfinite(extremes).all(0)),
        ):
            if wrong.any():
                raise ArgumentError(f"{name} must be three finite numbers{' other than 0' * (name == 'std')}: {values}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one row."""
        return (*self.size, 3) if self.layout == "HWC" else (3, *self.size)

    @property
    def is_random(self) -> bool:
        """True if rows depend on their keys."""
        return self.crop.is_random or self.flip > 0


def _is_probability(value: Any) -> bool:
    return isinstance(value, Real) and 0 <= value <= 1  # type: ignore[operator]  # a real number compares


def geometry(recipe: Recipe, key: int | None, width: int, height: int) -> Geometry:
    """Geometry that `read_batch` uses for this image size and key.

    A key gives the stream u_0, u_1, … in [0, 1) of `Draws`: for `RandomBox` area and ratio of each attempt, then x and
    y of the attempt that fits; one more for the flip. None draws a key from torch's generator.
    """
    if key is None:
        key = int(torch_keys(1)[0]) if recipe.is_random else 0
    rng = Draws(key)
    plan = recipe.crop.place(recipe.size, width, height, rng)
    return replace(plan, flip=rng.unit() < recipe.flip)
