"""The end of a picture: levels become the numbers that a model takes.

The two pipelines that most training on ImageNet-like pictures begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from feedline.images.recipe import DTYPES, LAYOUTS
from feedline.transforms import _arguments
from feedline.transforms._arguments import settle
from feedline.transforms.base import Transform
from feedline.transforms.compose import Compose
from feedline.transforms.geometry import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from feedline.transforms.native_steps import Conversion
from feedline.transforms.steps import Step


@dataclass(frozen=True, slots=True, init=False)
class ToTensor(Transform):
    """The levels as a tensor: divided by 255 where `dtype` is float32 or bfloat16, as they are for uint8.

    `layout` "CHW" gives (channels, height, width); "HWC" keeps (height, width, channels).
    """

    dtype: torch.dtype
    layout: str

    def __init__(self, dtype: torch.dtype = torch.float32, layout: str = "CHW") -> None:
        settle(
            self,
            dtype=_arguments.one_of(self, "dtype", dtype, DTYPES),
            layout=_arguments.one_of(self, "layout", layout, LAYOUTS),
        )

    def step(self) -> Step:
        return Conversion(self.dtype, self.layout)


@dataclass(frozen=True, slots=True, init=False)
class Normalize(Transform):
    """`(level / 255 - mean) / std` as a tensor of `dtype`, channels first (or in the layout of a ToTensor before it).

    `mean` and `std` are one number per channel, or one for all. A float tensor is taken as it is: `(x - mean) / std`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype

    def __init__(self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
        settle(
            self,
            mean=_arguments.numbers(self, "mean", mean, (1, 3)),
            std=_arguments.numbers(self, "std", std, (1, 3)),
            dtype=_arguments.one_of(self, "dtype", dtype, DTYPES[1:]),
        )
        if 0 in self.std:
            raise _arguments.refusal(self, "std", std, "a channel cannot be divided by 0; give its standard deviation")
        if len(self.mean) != len(self.std):
            raise _arguments.refusal(self, "std", std, f"there are {len(self.mean)} means: give as many")

    def step(self) -> Step:
        return Conversion(self.dtype, "CHW", self.mean, self.std)


IMAGENET_MEAN = (0.485, 0.456, 0.406)


IMAGENET_STD = (0.229, 0.224, 0.225)
"""Of the levels / 255 of ImageNet's training pictures: what published weights expect."""


def imagenet_train(size: int = 224, dtype: torch.dtype = torch.float32) -> Compose:
    """A random part of each picture, maybe mirrored, normalized: what most ImageNet models are trained with."""
    return Compose([RandomResizedCrop(size), RandomHorizontalFlip(), Normalize(IMAGENET_MEAN, IMAGENET_STD, dtype)])


def imagenet_eval(size: int = 224, resize: int = 256, dtype: torch.dtype = torch.float32) -> Compose:
    """The center of each picture, normalized: what such models are validated with."""
    return Compose([Resize(resize), CenterCrop(size), Normalize(IMAGENET_MEAN, IMAGENET_STD, dtype)])
