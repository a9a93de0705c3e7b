"""What is wanted of a picture: which part of it, at which size, as which numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from feedline.errors import ArgumentError

INTERPOLATIONS = ("bilinear", "bicubic")


LAYOUTS = ("HWC", "CHW")


DTYPES = (torch.uint8, torch.float32, torch.bfloat16)


_LARGEST = 65_500
"""Pixels along one side of an output: what a JPEG can hold, and small enough for every product of the kernels."""


@dataclass(frozen=True, slots=True)
class RandomBox:
    """A random part of the picture: torchvision's `RandomResizedCrop` law.

    `scale` bounds the share of the picture's area, `ratio` the width to height; ten attempts, then the largest
    central box within `ratio`.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, pair in (("scale", self.scale), ("ratio", self.ratio)):
            object.__setattr__(self, name, _increasing(name, pair))


@dataclass(frozen=True, slots=True)
class CenterBox:
    """The center: `Resize(shorter)`, then `CenterCrop(size)`, as one resampling of the window that is needed.

    Rounds as torchvision does; where the resized picture is smaller than `size`, zeros surround it.
    """

    shorter: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shorter", _side("CenterBox.shorter", self.shorter))


@dataclass(frozen=True, slots=True)
class WholeBox:
    """The whole picture, resized to `size` whatever its shape."""


CropPolicy = RandomBox | CenterBox | WholeBox


@dataclass(frozen=True, slots=True)
class Recipe:
    """A picture's way into a row of a batch: law → antialiased resize to `size` (height, width) → flip → numbers.

    `flip` is the probability of a horizontal flip. `interpolation` is "bilinear" or "bicubic", with Pillow's filters.
    uint8 rows hold the levels; float32 and bfloat16 rows hold `(level / 255 - mean) / std`, or `level / 255` where
    `mean` and `std` are None, computed in float32. With `apply_exif_orientation` the law sees the picture as it is
    meant to be looked at. `scaled_decode` lets JPEGs be decoded at 1/2, 1/4 or 1/8 while the box stays at least twice
    as large as the output; without it every pixel is decoded.
    """

    size: tuple[int, int]
    law: CropPolicy
    flip: float = 0.0
    interpolation: str = "bilinear"
    layout: str = "HWC"
    dtype: torch.dtype = torch.uint8
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    apply_exif_orientation: bool = False
    scaled_decode: bool = True

    def __post_init__(self) -> None:
        height, width = _several("size", self.size, 2)
        object.__setattr__(self, "size", (_side("size", height), _side("size", width)))
        if not isinstance(self.law, CropPolicy):
            raise ArgumentError(f"law must be a RandomBox, CenterBox or WholeBox, not {self.law!r}")
        if not 0 <= self.flip <= 1:
            raise ArgumentError(f"flip is a probability between 0 and 1, not {self.flip!r}")
        for name, allowed in (("interpolation", INTERPOLATIONS), ("layout", LAYOUTS), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise ArgumentError(f"{name} must be one of {choices}, not {getattr(self, name)!r}")
        self._check_normalization()

    def _check_normalization(self) -> None:
        if self.mean is None and self.std is None:
            return
        if self.mean is None or self.std is None:
            raise ArgumentError("mean and std belong together: give both or neither")
        if self.dtype == torch.uint8:
            raise ArgumentError("mean and std need floats: pass dtype=torch.float32 or torch.bfloat16")
        for name in ("mean", "std"):
            values = tuple(float(value) for value in _several(name, getattr(self, name), 3))
            if not all(map(math.isfinite, values)) or (name == "std" and 0.0 in values):
                raise ArgumentError(f"{name} must be three finite numbers{' other than 0' * (name == 'std')}: {values}")
            object.__setattr__(self, name, values)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one row."""
        return (*self.size, 3) if self.layout == "HWC" else (3, *self.size)

    @property
    def draws(self) -> bool:
        """Whether rows depend on their keys."""
        return isinstance(self.law, RandomBox) or self.flip > 0


def _several(name: str, values: Any, count: int) -> tuple[Any, ...]:
    try:
        several = tuple(values)
    except TypeError:
        several = ()
    if len(several) != count:
        raise ArgumentError(f"{name} must be {count} numbers, not {values!r}")
    return several


def _side(name: str, value: Any) -> int:
    if value != int(value) or not 1 <= value <= _LARGEST:
        raise ArgumentError(f"{name} counts pixels, from 1 to {_LARGEST:,}; got {value!r}")
    return int(value)


def _increasing(name: str, pair: Any) -> tuple[float, float]:
    low, high = (float(value) for value in _several(f"RandomBox.{name}", pair, 2))
    if not 0 < low <= high < math.inf:
        raise ArgumentError(f"RandomBox.{name} must be two positive numbers, the smaller first; got {pair!r}")
    return low, high
