"""Native image kernels, and the conversion of levels to numbers without them."""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import kernels
from feedline.images.recipe import Recipe

native: Any = kernels.native if hasattr(kernels.native, "ImagePlan") else None
"""The extension module; None if it was not built, or without libjpeg-turbo."""


ALL_SETS = 3
"""Sets of instructions that the kernels can use; value of `kAllSets` in native/image/passes.h."""


_DTYPES = {torch.uint8: 0, torch.float32: 1, torch.bfloat16: 2}
"""Values of `enum class Number` in native/image/writer.h."""


@lru_cache(maxsize=256)
def plan_of(recipe: Recipe) -> Any:
    """Native plan of a recipe; None without kernels."""
    if native is None:
        _warn_slow()
        return None
    return build_plan(recipe)


def build_plan(recipe: Recipe, *, sets: int = ALL_SETS, quick: bool = True) -> Any:
    """Build a native plan that is not cached.

    The kernels use the first `sets` of the baseline, AVX2 and AVX-512 that the CPU has; without `quick` libjpeg-turbo
    decodes all Huffman codes. All plans of a recipe give the same bits.
    """
    return native.ImagePlan(
        recipe.size,
        recipe.crop.kernel_kind,
        recipe.crop.kernel_bounds,
        flip=recipe.flip,
        bicubic=recipe.interpolation == "bicubic",
        planar=recipe.layout == "CHW",
        number=_DTYPES[recipe.dtype],
        values=values(recipe),
        mean=recipe.mean or (0, 0, 0),
        std=recipe.std or (1, 1, 1),
        oriented=recipe.apply_exif_orientation,
        scaled=recipe.scaled_decode,
        sets=sets,
        quick=quick,
    )


@lru_cache(maxsize=256)
def values(recipe: Recipe) -> NDArray[np.float32]:
    """Number of each level in each channel, (3, 256).

    Computed once, with torch's operations in torch's order, so that rows equal the results of ToTensor and Normalize.
    """
    shares = np.arange(256, dtype=np.float32) / np.float32(255)
    if recipe.mean is None or recipe.std is None:
        return np.tile(shares, (3, 1))
    mean, std = (np.asarray(numbers, np.float32)[:, None] for numbers in (recipe.mean, recipe.std))
    return np.asarray((shares - mean) / std)


def write(levels: NDArray[np.uint8], recipe: Recipe, row: NDArray[Any]) -> None:
    """Convert levels, (height, width, 3), to a row, without kernels."""
    if recipe.dtype == torch.uint8:
        numbers: NDArray[Any] = levels
    else:
        numbers = np.stack([table[levels[..., channel]] for channel, table in enumerate(values(recipe))], axis=-1)
    if recipe.layout == "CHW":
        numbers = numbers.transpose(2, 0, 1)
    if recipe.dtype == torch.bfloat16:
        # NumPy has no bfloat16: torch rounds, and the row holds the bits as 16-bit integers.
        numbers = torch.from_numpy(numbers).to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(row.dtype)
    row[...] = numbers


@cache
def _warn_slow() -> None:
    warnings.warn(
        "feedline runs without its native image kernels: Pillow decodes the images, with equal results, but several"
        " times slower. Install a C++ compiler, the Python headers and those of libjpeg-turbo (Debian:"
        " libjpeg62-turbo-dev), then reinstall feedline.",
        kernels.SlowKernelsWarning,
        stacklevel=4,
    )
