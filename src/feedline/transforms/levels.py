"""Arithmetic on levels: the native kernels where they were built, else Pillow, whose results they equal."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from feedline import _kernels
from feedline.transforms.pictures import Picture

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
"""Torchvision's numbers of the four; as `enum class Adjustment` in native/image/color.h."""

NEUTRAL = (1.0, 1.0, 1.0, 0.0)
"""The factors that change nothing."""

_ENHANCERS = {
    BRIGHTNESS: ImageEnhance.Brightness,
    CONTRAST: ImageEnhance.Contrast,
    SATURATION: ImageEnhance.Color,
}

_native: Any = _kernels.native if hasattr(_kernels.native, "adjust_colors") else None


def adjusted(picture: Picture, adjustments: list[tuple[int, float]]) -> Picture:
    """Brightness, contrast, saturation and hue, changed one after the other by (which, factor)."""
    if picture.shape[2] == 1:  # grey has neither saturation nor hue
        adjustments = [(which, factor) for which, factor in adjustments if which in (BRIGHTNESS, CONTRAST)]
    if not adjustments:
        return picture
    if _native is None:
        return _through_pillow(picture, adjustments)
    out = np.array(picture, order="C")
    _native.adjust_colors(out, adjustments)
    return out


def blurred(picture: Picture, kernel_x: NDArray[np.float32], kernel_y: NDArray[np.float32]) -> Picture:
    """Every level replaced by the weighted mean around it, mirrored at the edges; rounded, at ties to even levels."""
    across, down = len(kernel_x) // 2, len(kernel_y) // 2
    padded = np.pad(picture, ((down, down), (across, across), (0, 0)), "reflect")
    if _native is not None:
        out = np.empty_like(picture, order="C")
        _native.blur_picture(np.ascontiguousarray(padded), kernel_x.tolist(), kernel_y.tolist(), out)
        return out
    return _rounded(_weighted(_weighted(padded.astype(np.float32), kernel_x, 1), kernel_y, 0))


def _through_pillow(picture: Picture, adjustments: list[tuple[int, float]]) -> Picture:
    image = Image.fromarray(picture if picture.shape[2] == 3 else picture[:, :, 0])
    for which, factor in adjustments:
        image = _turned(image, factor) if which == HUE else _ENHANCERS[which](image).enhance(factor)
    return np.array(image).reshape(picture.shape)


def _turned(image: Image.Image, share: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    turn = np.uint8(int(share * 255) % 256)
    hue = Image.fromarray(np.asarray(hue) + turn)
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def _weighted(levels: NDArray[np.float32], kernel: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """Sums of shifted copies, in the order in which the native kernel adds them."""
    length = levels.shape[axis] - len(kernel) + 1
    shifted = (levels.take(range(at, at + length), axis) for at in range(len(kernel)))
    total = np.zeros_like(levels.take(range(length), axis))
    for weight, part in zip(kernel, shifted, strict=True):
        total += weight * part
    return total


def _rounded(levels: NDArray[np.float32]) -> Picture:
    return np.rint(levels).clip(0, 255).astype(np.uint8)
