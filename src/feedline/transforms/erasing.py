"""Random erasing of a rectangle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.rng import Draws, derive
from feedline.errors import SampleError
from feedline.transforms import _arguments
from feedline.transforms._arguments import Interval, init_frozen
from feedline.transforms.base import Transform
from feedline.transforms.inputs import ImageLevels, pixels
from feedline.transforms.steps import ImageSpec

_ATTEMPTS = 10


EraseValue = float | tuple[float, ...] | str


RowsAndColumns = tuple[slice, slice]


@dataclass(frozen=True, slots=True, init=False)
class RandomErasing(Transform):
    """Random rectangle replaced by `value`, with probability `p` (Zhong et al., arXiv:1708.04896).

    The rectangle's share of the area is uniform in `scale`, its height-to-width ratio log-uniform in `ratio`. `value`
    is a number, one per channel, or "random": normal noise in tensors, uniform levels in images. Before ToTensor and
    Normalize it is a level from 0 to 255, after them a number of the tensor, whose channels come first.
    """

    p: float
    scale: Interval
    ratio: Interval
    value: EraseValue

    accepts_tensors: ClassVar[bool] = True

    def __init__(
        self,
        p: float = 0.5,
        scale: Interval = (0.02, 0.33),
        ratio: Interval = (0.3, 3.3),
        value: float | Sequence[float] | str = 0,
    ) -> None:
        init_frozen(
            self,
            p=_arguments.check_probability(self, "p", p),
            scale=_arguments.check_interval(self, "scale", scale, 0.0, 1.0),
            ratio=_arguments.check_positive_interval(self, "ratio", ratio),
            value=_check_value(self, value),
        )

    def apply(self, image: Any, rng: Draws) -> Any:
        return self._erase_tensor(image, rng) if isinstance(image, torch.Tensor) else self._erase(pixels(image), rng)

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        if spec is not None and spec.converted and spec.layout != "CHW":
            raise _arguments.argument_error(self, "value", self.value, "put it before ToTensor(layout='HWC')")
        return spec

    def _erase_tensor(self, numbers: torch.Tensor, rng: Draws) -> torch.Tensor:
        part = self.choose_part(rng, *numbers.shape[-2:])
        if part is None:
            return numbers
        erased = numbers.clone()
        inside = erased[..., part[0], part[1]]
        if self.value == "random":
            inside[...] = torch.from_numpy(noise(rng.key, tuple(inside.shape), numbers.is_floating_point()))
        else:
            values = self.values(numbers.shape[-3], are_levels=not numbers.is_floating_point())
            inside[...] = torch.tensor(values, device=inside.device).view(-1, 1, 1)
        return erased

    def _erase(self, image: ImageLevels, rng: Draws) -> ImageLevels:
        part = self.choose_part(rng, *image.shape[:2])
        if part is None:
            return image
        erased = image.copy()
        inside = erased[part]
        if self.value == "random":
            inside[...] = noise(rng.key, inside.shape, is_normal=False)
        else:
            inside[...] = np.array(self.values(image.shape[2], are_levels=True))
        return erased

    def choose_part(self, rng: Draws, height: int, width: int) -> RowsAndColumns | None:
        """Draw the rectangle as torchvision's `RandomErasing.get_params` does; None to erase nothing."""
        if rng.unit() >= self.p:
            return None
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            area = height * width * rng.between(*self.scale)
            ratio = math.exp(rng.between(low, high))
            tall, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if tall < height and wide < width:
                top, left = rng.below(height - tall + 1), rng.below(width - wide + 1)
                return slice(top, top + tall), slice(left, left + wide)
        return None

    def values(self, channels: int, are_levels: bool) -> tuple[float, ...]:
        assert not isinstance(self.value, str)
        each = self.value if isinstance(self.value, tuple) else (self.value,)
        if are_levels and not all(0 <= value <= 255 for value in each):
            raise _arguments.argument_error(
                self, "value", self.value, "levels lie between 0 and 255; or put it after Normalize"
            )
        if len(each) not in (1, channels):
            raise SampleError(
                f"{self} has {len(each)} values, but the image has {channels} channel(s): give one for each"
            )
        return each


def noise(key: int, shape: tuple[int, ...], is_normal: bool) -> NDArray[Any]:
    rng = np.random.Generator(np.random.Philox(key=derive(key, "noise")))
    return rng.standard_normal(shape, np.float32) if is_normal else rng.integers(0, 256, shape, np.uint8)


def _check_value(transform: RandomErasing, value: Any) -> EraseValue:
    if isinstance(value, str):
        return str(_arguments.check_choice(transform, "value", value, ("random",)))
    if isinstance(value, (int, float)):
        return _arguments.check_numbers(transform, "value", (value,), (1,))[0]
    return _arguments.check_numbers(transform, "value", value, (1, 3))
