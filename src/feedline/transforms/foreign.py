"""Foreign callables among the transforms: torchvision's, albumentations', your own functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from PIL import Image

from feedline.core.rng import Draws
from feedline.core.sample_transform import SampleTransform
from feedline.images.decode import Grid
from feedline.transforms._arguments import init_frozen
from feedline.transforms.base import Transform
from feedline.transforms.inputs import open_image, pixels
from feedline.transforms.steps import ImageSpec

Callee = Callable[..., Any]


@dataclass(frozen=True, slots=True, repr=False)
class Foreign(Transform):
    """Callable on PIL images, or tensors after ToTensor or Normalize."""

    fn: Callee
    _call: SampleTransform = field(init=False, repr=False, compare=False)

    accepts_tensors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        init_frozen(self, _call=SampleTransform(self.fn))  # once: looking at a signature is slow

    @property
    def is_random(self) -> bool:
        """True if the callable takes an rng; global generators do not count."""
        return self._call.takes_rng

    def apply(self, image: Any, rng: Draws) -> Any:
        return self._call.with_key(self._argument(image), rng.key)

    def apply_source(self, source: Any, rng: Draws, grid: Grid | None = None) -> Any:  # noqa: ARG002 - Pillow decodes
        return self._call.with_key(self._argument(source), rng.key)

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:  # noqa: ARG002 - it may return anything
        return None

    def _argument(self, sample: Any) -> Any:
        if isinstance(sample, (Image.Image, torch.Tensor)):
            return sample
        levels = pixels(sample)
        return Image.fromarray(levels if levels.shape[2] == 3 else levels[:, :, 0])

    def __repr__(self) -> str:
        return repr(self.fn)


@dataclass(frozen=True, slots=True)
class OnArray(Foreign):
    """Callable on arrays: `fn(array)` or `fn(array, rng)`, with uint8 (height, width, channels).

    It may return an array, a PIL image or a tensor; it must not write into the array that it gets.
    """

    def _argument(self, sample: Any) -> Any:
        return open_image(sample)
