"""Conversion of images to tensors, and the standard pipelines of ImageNet models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from feedline.images.recipe import DTYPES, LAYOUTS
from feedline.transforms._arguments import argument_error, check_choice, check_numbers, init_frozen
from feedline.transforms.base import Transform
from feedline.transforms.compose import Compose
from feedline.transforms.geometry import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from feedline.transforms.native_steps import Conversion
from feedline.transforms.steps import Step


@dataclass(frozen=True, slots=True, init=False)
class ToTensor(Transform):
    """Levels as a tensor, divided by 255 unless `dtype` is uint8.

    `layout` "CHW" gives (channels, height, width); "HWC" keeps (height, width, channels).
    """

    dtype: torch.dtype
    layout: str

    def __init__(self, dtype: torch.dtype = torch.float32, layout: str = "CHW") -> None:
        init_frozen(
            self,
            dtype=check_choice(self, "dtype", dtype, DTYPES),
            layout=check_choice(self, "layout", layout, LAYOUTS),
        )

    def lower(self) -> Step:
        return Conversion(self.dtype, self.layout)


@dataclass(frozen=True, slots=True, init=False)
class Normalize(Transform):
    """Normalized tensor: `(level / 255 - mean) / std`.

    `mean` and `std` are one number per channel, or one for all. Channels come first, or in the layout of a ToTensor
    just before. The result has `dtype`. A float tensor is not divided by 255: `(x - mean) / std`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype

    def __init__(self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
        init_frozen(
            self,
            mean=check_numbers(self, "mean", mean, (1, 3)),
            std=check_numbers(self, "std", std, (1, 3)),
            dtype=check_choice(self, "dtype", dtype, DTYPES[1:]),
        )
        if 0 in self.std:
            raise argument_error(self, "std", std, "a channel cannot be divided by 0; give its standard deviation")
        if len(self.mean) != len(self.std):
            raise argument_error(self, "std", std, f"there are {len(self.mean)} means: give as many")

    def lower(self) -> Step:
        return Conversion(self.dtype, "CHW", self.mean, self.std)


IMAGENET_MEAN = (0.485, 0.456, 0.406)


IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of level / 255 in ImageNet's training set, which published weights expect."""


def imagenet_train(size: int = 224, dtype: torch.dtype = torch.float32, *, scaled_decode: bool = False) -> Compose:
    """Training pipeline of most ImageNet models: random resized crop, horizontal flip, normalization.

    Gives tensors of `dtype`, (3, `size`, `size`). `scaled_decode` is that of `images.Recipe`.
    """
    crop = RandomResizedCrop(size, scaled_decode=scaled_decode)
    return Compose([crop, RandomHorizontalFlip(), Normalize(IMAGENET_MEAN, IMAGENET_STD, dtype)])


def imagenet_eval(
    size: int = 224, resize: int = 256, dtype: torch.dtype = torch.float32, *, scaled_decode: bool = False
) -> Compose:
    """Validation pipeline of most ImageNet models: resize, center crop, normalization.

    `resize` is the shorter side before the crop; the rest is as in `imagenet_train`.
    """
    shorter = Resize(resize, scaled_decode=scaled_decode)
    return Compose([shorter, CenterCrop(size), Normalize(IMAGENET_MEAN, IMAGENET_STD, dtype)])
