"""Callables of anyone's among the transforms: torchvision's, albumentations', the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image

from feedline.core.rng import SampleRng, takes_rng
from feedline.transforms.base import Transform
from feedline.transforms.inputs import opened, pixels
from feedline.transforms.steps import ImageSpec, Step

Callee = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A callable gets the picture as a PIL image or as an array; a tensor as it is."""

    fn: Callee
    as_array: bool
    draws: bool

    takes_numbers: ClassVar[bool] = True
    reads: ClassVar[bool] = True

    def apply(self, sample: Any, key: int) -> Any:
        given = self._given(sample)
        return self.fn(given, SampleRng(key)) if self.draws else self.fn(given)

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:  # noqa: ARG002 - it may give anything
        return None

    def _given(self, sample: Any) -> Any:
        if self.as_array:
            return opened(sample)
        if isinstance(sample, (Image.Image, torch.Tensor)):
            return sample
        given = pixels(sample)
        return Image.fromarray(given if given.shape[2] == 3 else given[:, :, 0])


@dataclass(frozen=True, slots=True, repr=False)
class Foreign(Transform):
    """A callable, called with a PIL image; after ToTensor or Normalize, with the tensor."""

    fn: Callee

    def step(self) -> Step:
        return Call(self.fn, as_array=False, draws=takes_rng(self.fn))

    def __repr__(self) -> str:
        return repr(self.fn)


@dataclass(frozen=True, slots=True)
class OnArray(Transform):
    """`fn(array)` or `fn(array, rng)`: a callable that works on uint8 arrays (height, width, channels).

    It may give an array again, a PIL image or a tensor; it must not write into the array that it gets.
    """

    fn: Callee

    def step(self) -> Step:
        return Call(self.fn, as_array=True, draws=takes_rng(self.fn))
