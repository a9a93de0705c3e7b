"""Steps that run as one native call, and the fusions between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from feedline import images
from feedline.core.dataset import Keys
from feedline.core.rng import Draws
from feedline.core.tensors import numpy_view
from feedline.errors import ArgumentError, SampleError
from feedline.images import Recipe, WholeBox
from feedline.images.decode import Grid
from feedline.transforms.inputs import ImageLevels, as_source, pixels
from feedline.transforms.steps import ImageSpec, PlannedStep, Step, register_fusion

Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Conversion(Step):
    """Levels to numbers, for ToTensor and Normalize.

    `mean` and `std` have one number, or one per channel.
    """

    dtype: torch.dtype
    layout: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    accepts_tensors: ClassVar[bool] = True
    applies_to_batches: ClassVar[bool] = True

    @property
    def is_random(self) -> bool:
        return False

    def apply(self, image: Any, rng: Draws) -> torch.Tensor:  # noqa: ARG002 - not random
        if isinstance(image, torch.Tensor) and image.dtype != torch.uint8:
            return self._normalize(image.float())
        image = pixels(image)
        if image.shape[2] == 3:
            return images.read_one(image, self._recipe(image))
        return self.convert_gray(image)

    def apply_batch(
        self,
        sources: Sequence[Any],
        keys: Keys | None,  # noqa: ARG002 - not random
        out: torch.Tensor,
        grids: Sequence[Grid | None] | None = None,
        threads: int = 1,
    ) -> None:
        if sources[0].shape[2] == 3:
            images.read_batch(sources, self._recipe(sources[0]), numpy_view(out), grids=grids, threads=threads)
            return
        for row, image in zip(out, sources, strict=True):
            gray = self.convert_gray(image)
            if gray.shape != row.shape:  # copy_() would repeat the channel
                raise ArgumentError(
                    f"a sample came out with shape {tuple(gray.shape)} in a batch of {tuple(row.shape)}: convert gray"
                    " images with Grayscale(num_output_channels=3), or make the samples one by one"
                )
            row.copy_(gray)

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        return spec and replace(spec, converted=True, dtype=self.dtype, layout=self.layout)

    def extend(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this conversion at its end."""
        return replace(recipe, dtype=self.dtype, layout=self.layout, mean=_triple(self.mean), std=_triple(self.std))

    def convert_gray(self, image: ImageLevels) -> torch.Tensor:
        """Convert gray levels, (height, width, 1), without kernels."""
        levels = torch.tensor(np.ascontiguousarray(image), device="cpu").movedim(-1, -3)
        numbers = levels if self.dtype == torch.uint8 else self._normalize(levels / 255)
        return (numbers if self.layout == "CHW" else numbers.movedim(-3, -1)).contiguous()

    def _recipe(self, image: ImageLevels) -> Recipe:
        return self.extend(Recipe((image.shape[0], image.shape[1]), WholeBox()))

    def _normalize(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.mean is not None and self.std is not None:
            channels = numbers.shape[-3] if numbers.ndim > 2 else 1
            if len(self.mean) not in (1, channels):
                raise SampleError(
                    f"Normalize has {len(self.mean)} means, but the image has {channels} channel(s):"
                    " give one mean and std per channel, or make it RGB with Grayscale(num_output_channels=3)"
                )
            mean, std = (torch.tensor(values, device="cpu").view(-1, 1, 1) for values in (self.mean, self.std))
            numbers = (numbers - mean) / std
        return numbers.to(self.dtype)


def _triple(values: tuple[float, ...] | None) -> Triple | None:
    if values is None:
        return None
    red, green, blue = values if len(values) == 3 else values * 3
    return red, green, blue


@dataclass(frozen=True, slots=True)
class Window(Step):
    """Crop, resize and flip of one recipe, and the conversion to numbers.

    Without a `conversion` the result is levels.
    """

    recipe: Recipe
    conversion: Conversion | None = None

    applies_to_batches: ClassVar[bool] = True

    @property
    def is_random(self) -> bool:
        return self.recipe.is_random

    def apply(self, image: Any, rng: Draws) -> Any:
        return self.apply_source(image, rng)

    def apply_source(self, source: Any, rng: Draws, grid: Grid | None = None) -> Any:
        source = as_source(source)
        if isinstance(source, np.ndarray) and source.shape[-1] == 1 and source.ndim == 3:
            return self._apply_gray(source, rng.key)
        row = images.read_one(source, self.recipe, rng.key, grid=grid)
        return row.numpy() if self.conversion is None else row

    def apply_batch(
        self,
        sources: Sequence[images.ImageSource],
        keys: Keys | None,
        out: torch.Tensor,
        grids: Sequence[Grid | None] | None = None,
        threads: int = 1,
    ) -> None:
        images.read_batch(sources, self.recipe, numpy_view(out), keys, grids=grids, threads=threads)

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        levels = spec and replace(spec, size=self.recipe.size)
        return levels if self.conversion is None else self.conversion.infer(levels)

    def _apply_gray(self, image: ImageLevels, key: int) -> Any:
        # The kernels take three channels. Each of three equal ones gets the result of the gray channel alone.
        recipe = replace(self.recipe, dtype=torch.uint8, layout="HWC", mean=None, std=None)
        row = images.read_one(np.repeat(image, 3, axis=2), recipe, key).numpy()
        gray = np.ascontiguousarray(row[:, :, :1])
        return gray if self.conversion is None else self.conversion.convert_gray(gray)


@dataclass(frozen=True, slots=True)
class ResizeShortest(Step):
    """Whole image, with its shorter side resized to `side` pixels."""

    side: int
    interpolation: str
    scaled_decode: bool

    @property
    def is_random(self) -> bool:
        return False

    def apply(self, image: Any, rng: Draws) -> Any:
        return self.apply_source(image, rng)

    def apply_source(self, source: Any, rng: Draws, grid: Grid | None = None) -> Any:
        source = as_source(source)
        recipe = resize_recipe(self.resized(*_size_of(source)), self.interpolation, self.scaled_decode)
        return Window(recipe).apply_source(source, rng, grid)

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        return spec and replace(spec, size=None if spec.size is None else self.resized(*spec.size))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Size after the step; truncates the longer side, as torchvision does."""
        longer = self.side * max(height, width) // min(height, width)
        return (longer, self.side) if height > width else (self.side, longer)


def resize_recipe(size: tuple[int, int], interpolation: str, scaled_decode: bool) -> Recipe:
    """Recipe of the whole image, resized to `size`."""
    return Recipe(size, WholeBox(), interpolation=interpolation, scaled_decode=scaled_decode)


def _size_of(source: images.ImageSource) -> tuple[int, int]:
    if isinstance(source, np.ndarray) and source.ndim == 3:
        return source.shape[0], source.shape[1]
    header = images.probe(source)
    return header.height, header.width


def _fuse_conversion(before: PlannedStep, after: PlannedStep) -> PlannedStep | None:
    """Fuse a conversion into the window, which then writes numbers."""
    window, conversion = before.step, after.step
    assert isinstance(window, Window)
    assert isinstance(conversion, Conversion)
    both = conversion if window.conversion is None else _combine(window.conversion, conversion)
    return None if both is None else replace(before, step=Window(both.extend(window.recipe), both))


def _fuse_conversions(before: PlannedStep, after: PlannedStep) -> PlannedStep | None:
    assert isinstance(before.step, Conversion)
    assert isinstance(after.step, Conversion)
    both = _combine(before.step, after.step)
    return None if both is None else replace(after, step=both)


def _combine(first: Conversion, then: Conversion) -> Conversion | None:
    """Merge ToTensor and the conversion after it; None if `first` normalizes."""
    return None if first.mean is not None else replace(then, layout=first.layout)


register_fusion(Window, Conversion, _fuse_conversion)
register_fusion(Conversion, Conversion, _fuse_conversions)
