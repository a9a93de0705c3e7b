"""RandomErasing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.rng import derive
from feedline.errors import SampleError
from feedline.transforms import _arguments
from feedline.transforms._arguments import Interval, settle
from feedline.transforms._random import Draws
from feedline.transforms.base import Transform
from feedline.transforms.inputs import Picture, pixels
from feedline.transforms.steps import ImageSpec, Step

_ATTEMPTS = 10


Value = float | tuple[float, ...] | str


Part = tuple[slice, slice]
"""Rows and columns."""


@dataclass(frozen=True, slots=True, init=False)
class RandomErasing(Transform):
    """A random rectangle replaced by `value`, with probability `p` (Zhong et al., arXiv:1708.04896).

    Its share of the area is uniform in `scale`, its height-to-width ratio log-uniform in `ratio`. `value` is a number,
    one per channel, or "random": normal noise in tensors, any levels in pictures. Before ToTensor and Normalize it is
    a level from 0 to 255, after them a number of the tensor, whose channels come first.
    """

    p: float
    scale: Interval
    ratio: Interval
    value: Value

    takes_numbers: ClassVar[bool] = True
    reads: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def __init__(
        self,
        p: float = 0.5,
        scale: Interval = (0.02, 0.33),
        ratio: Interval = (0.3, 3.3),
        value: float | Sequence[float] | str = 0,
    ) -> None:
        settle(
            self,
            p=_arguments.probability(self, "p", p),
            scale=_arguments.interval(self, "scale", scale, 0.0, 1.0),
            ratio=_arguments.positive_interval(self, "ratio", ratio),
            value=_value(self, value),
        )

    def step(self) -> Step:
        return self

    def apply(self, sample: Any, key: int) -> Any:
        if isinstance(sample, torch.Tensor):
            return self._in_tensor(sample, key)
        return self._in_picture(pixels(sample), key)

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        if form is not None and form.converted and form.layout != "CHW":
            raise _arguments.refusal(self, "value", self.value, "put it before ToTensor(layout='HWC')")
        return form

    def _in_tensor(self, numbers: torch.Tensor, key: int) -> torch.Tensor:
        part = self._part(Draws(key), *numbers.shape[-2:])
        if part is None:
            return numbers
        erased = numbers.clone()
        inside = erased[..., part[0], part[1]]
        if self.value == "random":
            inside[...] = torch.from_numpy(_noise(key, tuple(inside.shape), numbers.is_floating_point()))
        else:
            values = self._values(numbers.shape[-3], levels=not numbers.is_floating_point())
            inside[...] = torch.tensor(values).view(-1, 1, 1)
        return erased

    def _in_picture(self, picture: Picture, key: int) -> Picture:
        part = self._part(Draws(key), *picture.shape[:2])
        if part is None:
            return picture
        erased = picture.copy()
        inside = erased[part]
        if self.value == "random":
            inside[...] = _noise(key, inside.shape, normal=False)
        else:
            inside[...] = np.array(self._values(picture.shape[2], levels=True))
        return erased

    def _part(self, draws: Draws, height: int, width: int) -> Part | None:
        """As torchvision's `RandomErasing.get_params`, the draws apart; None to erase nothing."""
        if draws.unit() >= self.p:
            return None
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            area = height * width * draws.between(*self.scale)
            ratio = math.exp(draws.between(low, high))
            tall, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if tall < height and wide < width:
                top, left = draws.below(height - tall + 1), draws.below(width - wide + 1)
                return slice(top, top + tall), slice(left, left + wide)
        return None

    def _values(self, channels: int, levels: bool) -> tuple[float, ...]:
        assert not isinstance(self.value, str)
        each = self.value if isinstance(self.value, tuple) else (self.value,)
        if levels and not all(0 <= value <= 255 for value in each):
            raise _arguments.refusal(
                self, "value", self.value, "levels lie between 0 and 255; or put it after Normalize"
            )
        if len(each) not in (1, channels):
            raise SampleError(
                f"{self} has {len(each)} values, but the image has {channels} channel(s): give one for each"
            )
        return each


def _noise(key: int, shape: tuple[int, ...], normal: bool) -> NDArray[Any]:
    rng = np.random.Generator(np.random.Philox(key=derive(key, "noise")))
    return rng.standard_normal(shape, np.float32) if normal else rng.integers(0, 256, shape, np.uint8)


def _value(owner: RandomErasing, value: Any) -> Value:
    if isinstance(value, str):
        return str(_arguments.one_of(owner, "value", value, ("random",)))
    if isinstance(value, (int, float)):
        return _arguments.numbers(owner, "value", (value,), (1,))[0]
    return _arguments.numbers(owner, "value", value, (1, 3))
