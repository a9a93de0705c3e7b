"""The steps that become one native call: a window of the picture, resized, mirrored, turned into numbers.

A part of a picture that may reach beyond its edges, without padding the whole picture first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import images
from feedline.errors import SampleError
from feedline.images import Recipe, WholeBox
from feedline.transforms._random import Draws
from feedline.transforms.inputs import Picture, loaded, pixels
from feedline.transforms.steps import ImageSpec

MODES = ("constant", "edge", "reflect", "symmetric")


@dataclass(frozen=True, slots=True)
class Border:
    """What lies beyond the edges: `np.pad`'s modes, and for "constant" a level, or one per channel."""

    mode: str = "constant"
    fill: int | tuple[int, ...] = 0


def cut(picture: Picture, top: int, left: int, size: tuple[int, int], border: Border) -> Picture:
    """The part of `size` (height, width) that begins at (top, left), in memory of its own."""
    height, width = size
    if border.mode == "constant":
        return _filled(picture, top, left, size, border.fill)
    rows = _folded(np.arange(top, top + height), picture.shape[0], border.mode)
    columns = _folded(np.arange(left, left + width), picture.shape[1], border.mode)
    part: Picture = picture[rows[:, None], columns]
    return part


def _filled(picture: Picture, top: int, left: int, size: tuple[int, int], fill: int | tuple[int, ...]) -> Picture:
    height, width = size
    inside = picture[max(0, top) : max(0, top + height), max(0, left) : max(0, left + width)]
    if inside.shape[:2] == size:
        return inside.copy()
    out = np.empty((height, width, picture.shape[2]), np.uint8)
    out[...] = fill
    y, x = max(0, -top), max(0, -left)
    out[y : y + inside.shape[0], x : x + inside.shape[1]] = inside
    return out


def _folded(places: NDArray[np.int64], length: int, mode: str) -> NDArray[np.int64]:
    """Places on an endless line, folded back onto `range(length)`."""
    if mode == "edge" or length == 1:
        return places.clip(0, length - 1)
    period = 2 * length if mode == "symmetric" else 2 * length - 2
    places = places % period
    return np.minimum(places, period - places - (mode == "symmetric"))


Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Levels to numbers: what ToTensor and Normalize become. `mean` and `std` have one number, or one per channel."""

    dtype: torch.dtype
    layout: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    takes_numbers: ClassVar[bool] = True
    reads: ClassVar[bool] = False
    draws: ClassVar[bool] = False

    def apply(self, sample: Any, key: int) -> torch.Tensor:  # noqa: ARG002 - nothing is drawn
        if isinstance(sample, torch.Tensor) and sample.dtype != torch.uint8:
            return self._normalized(sample.float())
        picture = pixels(sample)
        if picture.shape[2] == 3:
            return images.read_one(picture, self.recipe((picture.shape[0], picture.shape[1])))
        return self.of_gray(picture)

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        return form and replace(form, converted=True, dtype=self.dtype, layout=self.layout)

    def recipe(self, size: tuple[int, int]) -> Recipe:
        """The conversion by itself, of pictures of three channels."""
        return self.onto(Recipe(size, WholeBox()))

    def onto(self, recipe: Recipe) -> Recipe:
        return replace(recipe, dtype=self.dtype, layout=self.layout, mean=_triple(self.mean), std=_triple(self.std))

    def of_gray(self, picture: Picture) -> torch.Tensor:
        """Pictures of one channel: (…, height, width, 1)."""
        levels = torch.tensor(np.ascontiguousarray(picture)).movedim(-1, -3)
        numbers = levels if self.dtype == torch.uint8 else self._normalized(levels / 255)
        return (numbers if self.layout == "CHW" else numbers.movedim(-3, -1)).contiguous()

    def _normalized(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.mean is not None and self.std is not None:
            channels = numbers.shape[-3] if numbers.ndim > 2 else 1
            if len(self.mean) not in (1, channels):
                raise SampleError(
                    f"Normalize has {len(self.mean)} means, but the image has {channels} channel(s):"
                    " give one mean and std per channel, or make it RGB with Grayscale(num_output_channels=3)"
                )
            mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
            numbers = (numbers - mean) / std
        return numbers.to(self.dtype)


def _triple(values: tuple[float, ...] | None) -> Triple | None:
    if values is None:
        return None
    red, green, blue = values if len(values) == 3 else values * 3
    return red, green, blue


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the picture by `recipe`'s law, resized and maybe mirrored; as numbers if there is a `conversion`."""

    recipe: Recipe
    conversion: Conversion | None = None

    takes_numbers: ClassVar[bool] = False
    reads: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        return self.recipe.draws

    def apply(self, sample: Any, key: int, grid: NDArray[np.uint16] | None = None) -> Any:
        source = loaded(sample)
        if isinstance(source, np.ndarray) and source.shape[-1] == 1 and source.ndim == 3:
            return self._of_gray(source, key)
        row = images.read_one(source, self.recipe, key, grid=grid)
        return row.numpy() if self.conversion is None else row

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        levels = form and replace(form, size=self.recipe.size)
        return levels if self.conversion is None else self.conversion.follow(levels)

    def _of_gray(self, picture: Picture, key: int) -> Any:
        """The kernels know three channels; of three equal ones, each comes out as the one would by itself."""
        levels = replace(self.recipe, dtype=torch.uint8, layout="HWC", mean=None, std=None)
        row = images.read_one(np.repeat(picture, 3, axis=2), levels, key).numpy()
        gray = np.ascontiguousarray(row[:, :, :1])
        return gray if self.conversion is None else self.conversion.of_gray(gray)


@dataclass(frozen=True, slots=True)
class ResizeShortest:
    """The whole picture, its shorter side resized to `side` pixels."""

    side: int
    interpolation: str

    takes_numbers: ClassVar[bool] = False
    reads: ClassVar[bool] = True
    draws: ClassVar[bool] = False

    def apply(self, sample: Any, key: int, grid: NDArray[np.uint16] | None = None) -> Any:
        source = loaded(sample)
        size = self.resized(*_size_of(source))
        return Window(Recipe(size, WholeBox(), interpolation=self.interpolation)).apply(source, key, grid)

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        return form and replace(form, size=None if form.size is None else self.resized(*form.size))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Torchvision's rounding: the longer side is cut down to whole pixels."""
        longer = self.side * max(height, width) // min(height, width)
        return (longer, self.side) if height > width else (self.side, longer)


def _size_of(source: images.Source) -> tuple[int, int]:
    if isinstance(source, np.ndarray) and source.ndim == 3:
        return source.shape[0], source.shape[1]
    header = images.probe(source)
    return header.height, header.width


@dataclass(frozen=True, slots=True)
class CentralCrop:
    """The central part of `size`, zeros around it where the picture is smaller."""

    size: tuple[int, int]

    takes_numbers: ClassVar[bool] = False
    reads: ClassVar[bool] = False
    draws: ClassVar[bool] = False

    def apply(self, sample: Any, key: int) -> Picture:  # noqa: ARG002 - nothing is drawn
        picture = pixels(sample)
        top, left = (_offset(length, wanted) for length, wanted in zip(picture.shape, self.size, strict=False))
        return cut(picture, top, left, self.size, Border())

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        return form and replace(form, size=self.size)


def _offset(length: int, wanted: int) -> int:
    """Where torchvision begins the part; negative where the picture is smaller, with the smaller half first."""
    return round((length - wanted) / 2) if wanted <= length else -((wanted - length) // 2)


@dataclass(frozen=True, slots=True)
class FlipStep:
    """Left and right exchanged with probability `p`: by the first number of the key."""

    p: float

    takes_numbers: ClassVar[bool] = False
    reads: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def apply(self, sample: Any, key: int) -> Picture:
        picture = pixels(sample)
        return np.ascontiguousarray(picture[:, ::-1]) if Draws(key).unit() < self.p else picture

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        return form


@dataclass(frozen=True, slots=True)
class Identity:
    """The sample as it is."""

    takes_numbers: ClassVar[bool] = True
    reads: ClassVar[bool] = False
    draws: ClassVar[bool] = False

    def apply(self, sample: Any, key: int) -> Any:  # noqa: ARG002 - nothing is drawn
        return sample

    def follow(self, form: ImageSpec | None) -> ImageSpec | None:
        return form
