"""The end of a picture: levels become the numbers that a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from feedline.images.recipe import DTYPES, LAYOUTS
from feedline.transforms import arguments
from feedline.transforms.arguments import settle
from feedline.transforms.steps import Step
from feedline.transforms.transform import Transform
from feedline.transforms.windows import Conversion


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
            dtype=arguments.one_of(self, "dtype", dtype, DTYPES),
            layout=arguments.one_of(self, "layout", layout, LAYOUTS),
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
            mean=arguments.numbers(self, "mean", mean, (1, 3)),
            std=arguments.numbers(self, "std", std, (1, 3)),
            dtype=arguments.one_of(self, "dtype", dtype, DTYPES[1:]),
        )
        if 0 in self.std:
            raise arguments.refusal(self, "std", std, "a channel cannot be divided by 0; give its standard deviation")
        if len(self.mean) != len(self.std):
            raise arguments.refusal(self, "std", std, f"there are {len(self.mean)} means: give as many")

    def step(self) -> Step:
        return Conversion(self.dtype, "CHW", self.mean, self.std)
