"""Images for the tests of transforms, and their rows by Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from feedline import images
from feedline.transforms import Transform

Pixels = NDArray[np.uint8]

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def random_image(height: int = 90, width: int = 120, seed: int = 0) -> Pixels:
    """Soft shapes with some grain: as hard to resample as a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
    soft = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return (soft + rng.integers(-20, 21, soft.shape)).clip(0, 255).astype(np.uint8)


def jpeg(array: Pixels, quality: int = 92) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "JPEG", quality=quality)
    return file.getvalue()


def with_orientation(array: Pixels, orientation: int) -> bytes:
    """A JPEG with an EXIF orientation."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(array).save(file, "JPEG", exif=exif)
    return file.getvalue()


def png(array: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def first_recipe(transform: Transform) -> images.Recipe:
    """The recipe that the kernels get for a pipeline that begins with a window."""
    step: Any = transform.plan.steps[0].step
    recipe: images.Recipe = step.recipe
    return recipe


def first_geometry(transform: Transform, key: int, array: Pixels) -> images.Geometry:
    """The part of the image that such a pipeline shows for a sample's key."""
    own = transform.plan.steps[0].key(key)
    return images.geometry(first_recipe(transform), own, array.shape[1], array.shape[0])


def through_pillow(array: Pixels, shown: images.Geometry, interpolation: str = "bilinear") -> Pixels:
    """Crop, resize, crop and flip as torchvision's PIL backend does, one after the other."""
    x, y, width, height = shown.box
    part = Image.fromarray(array).crop((x, y, x + width, y + height))
    whole = part.resize(shown.full[::-1], FILTERS[interpolation])
    left, top, width, height = shown.window
    window = np.asarray(whole.crop((left, top, left + width, top + height)))
    return window[:, ::-1] if shown.flip else window


def difference(one: Any, other: Any) -> int:
    """The largest, in levels."""
    one, other = np.asarray(one), np.asarray(other)
    assert one.shape == other.shape, (one.shape, other.shape)
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def ordinary(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An allocator whose memory never has the expected values by chance."""
    return torch.full(shape, 77, dtype=dtype)
