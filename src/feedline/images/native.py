"""The native image kernels where they were built; Pillow's speed otherwise, said once."""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import kernels
from feedline.core.kernels import SlowKernelsWarning
from feedline.images.recipe import CenterBox, RandomBox, Recipe

native: Any = kernels.native if hasattr(kernels.native, "ImagePlan") else None


_DTYPES = {torch.uint8: 0, torch.float32: 1, torch.bfloat16: 2}
"""As `enum class Number` in native/image/writer.h."""


@lru_cache(maxsize=256)
def plan_of(recipe: Recipe) -> Any:
    """The recipe as the kernels take it, or None without them."""
    if native is None:
        _say_slow()
        return None
    return made(recipe)


def made(recipe: Recipe, *, plain: bool = False, quick: bool = True) -> Any:
    """A plan of its own; one that is plain, or not quick, does without what only some CPUs, or files, allow.

    All give the same bits.
    """
    return native.ImagePlan(
        recipe.size,
        *_law(recipe),
        flip=recipe.flip,
        bicubic=recipe.interpolation == "bicubic",
        planar=recipe.layout == "CHW",
        number=_DTYPES[recipe.dtype],
        values=values(recipe),
        mean=recipe.mean or (0, 0, 0),
        std=recipe.std or (1, 1, 1),
        oriented=recipe.apply_exif_orientation,
        scaled=recipe.scaled_decode,
        plain=plain,
        quick=quick,
    )


def _law(recipe: Recipe) -> tuple[int, tuple[float, float, float, float]]:
    """As `enum class Kind` in native/image/geometry.h, and its numbers."""
    law = recipe.law
    if isinstance(law, RandomBox):
        return 0, (*law.scale, *law.ratio)
    return (1, (law.shorter, 0, 0, 0)) if isinstance(law, CenterBox) else (2, (0, 0, 0, 0))


@lru_cache(maxsize=256)
def values(recipe: Recipe) -> NDArray[np.float32]:
    """The number of each level in each channel, (3, 256): all arithmetic on levels, done once, as torch does it."""
    shares = np.arange(256, dtype=np.float32) / np.float32(255)
    if recipe.mean is None or recipe.std is None:
        return np.tile(shares, (3, 1))
    mean, std = (np.asarray(numbers, np.float32)[:, None] for numbers in (recipe.mean, recipe.std))
    return np.asarray((shares - mean) / std)


def write(levels: NDArray[np.uint8], recipe: Recipe, row: NDArray[Any]) -> None:
    """Write levels, (height, width, 3), into a row as the recipe wants them, without the kernels."""
    if recipe.dtype == torch.uint8:
        numbers: NDArray[Any] = levels
    else:
        numbers = np.stack([table[levels[..., channel]] for channel, table in enumerate(values(recipe))], axis=-1)
    if recipe.layout == "CHW":
        numbers = numbers.transpose(2, 0, 1)
    if recipe.dtype == torch.bfloat16:
        numbers = torch.from_numpy(numbers).to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(row.dtype)
    row[...] = numbers


@cache
def _say_slow() -> None:
    warnings.warn(
        "feedline runs without its native image kernels: pictures come the same, but through Pillow, several times"
        " slower. Install a C++ compiler, the Python headers and those of libjpeg-turbo (Debian: libjpeg62-turbo-dev),"
        " then reinstall feedline.",
        SlowKernelsWarning,
        stacklevel=4,
    )
