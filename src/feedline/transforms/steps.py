"""What a plan is made of: steps that know what they make of a sample, and where each finds its random key.

What is known of a sample before it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.rng import derive, derive_each
from feedline.transforms.inputs import opened


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """Size (height, width) and channels of a sample, None where the picture decides; and whether it ended as numbers.

    `dtype` and `layout` are those of a tensor, or of the levels: uint8, "HWC".
    """

    size: tuple[int, int] | None = None
    channels: int | None = 3
    converted: bool = False
    dtype: torch.dtype = torch.uint8
    layout: str = "HWC"

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Of the sample, if it is known."""
        if self.size is None or self.channels is None:
            return None
        return (*self.size, self.channels) if self.layout == "HWC" else (self.channels, *self.size)


Keys = NDArray[np.uint64]


Path = tuple[int, ...]
"""The places on the way from the outermost `Compose` to a step."""


class Step(Protocol):
    """One thing done to a sample; pure in (sample, key), never changing the sample that it is given."""

    takes_numbers: ClassVar[bool]
    """Whether it may come after ToTensor or Normalize, and then sees a tensor."""

    reads: ClassVar[bool]
    """Whether it takes paths, encoded bytes and PIL images as they are, without their being decoded first."""

    @property
    def draws(self) -> bool:
        """Whether the key matters."""

    def apply(self, sample: Any, key: int) -> Any:
        """The sample changed."""

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        """What is known of the sample afterwards; None for nothing at all."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step at its place; `name` is that of the transform it came from."""

    step: Step
    path: Path
    name: str

    def key(self, key: int) -> int:
        """The step's own key, derived from the sample's; 0 where it draws nothing."""
        if not self.step.draws:
            return 0
        for place in self.path:
            key = derive(key, place)
        return key

    def keys(self, keys: Keys) -> Keys:
        """The same for every sample."""
        for place in self.path:
            keys = derive_each((), keys, place)
        return keys


def first_form(steps: Sequence[PlannedStep], source: Any) -> Any:
    """What the first step takes of an image of any kind."""
    return source if steps[0].step.reads else opened(source)


def run(steps: Sequence[PlannedStep], sample: Any, keys: Sequence[int]) -> Any:
    """The sample after the steps, each of which has its own key."""
    for placed, key in zip(steps, keys, strict=True):
        sample = placed.step.apply(sample, key)
    return sample
