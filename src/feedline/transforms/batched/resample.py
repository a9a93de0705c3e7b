"""Crops and antialiased resizes, each row with its own box.

On the CPU each row is one call of torch's resize, which reads the box only. Elsewhere the rows are resampled by two
batched matrix products, one per axis: the matrices hold the weights of Pillow's filters, the box and the flip. Boxes of
images of different sizes are copied into tensors first, by one copy for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from feedline.core.devices import uploaded
from feedline.images.crops import Geometry
from feedline.images.native import plan_of
from feedline.images.recipe import Recipe, geometry
from feedline.transforms.batched import levels

Levels = torch.Tensor
"""uint8, (batch, channels, height, width), or a list of images (channels, height, width) of any sizes."""


def geometries(recipe: Recipe, keys: NDArray[np.uint64], sizes: Sequence[tuple[int, int]]) -> list[Geometry]:
    """Geometry of each row for images of `sizes` (height, width)."""
    plan = plan_of(recipe)
    each = zip(keys.tolist(), sizes, strict=True)
    if plan is None:
        return [geometry(recipe, key, width, height) for key, (height, width) in each]
    return [Geometry(*plan.geometry(key, width, height)) for key, (height, width) in each]


def resampled(images: Levels | Sequence[Levels], shown: Sequence[Geometry], interpolation: str) -> Levels:
    """Windows of `shown`, as uint8 levels (batch, channels, height, width)."""
    if levels.is_faster_by_rows(images[0]):
        return resample_rows(images, shown, interpolation)
    if isinstance(images, torch.Tensor):
        return resample_by_products(images, shown, interpolation)
    return _resample_boxes(images, shown, interpolation)


def resample_rows(images: Levels | Sequence[Levels], shown: Sequence[Geometry], interpolation: str) -> Levels:
    """Resample the rows one by one; see `resampled`."""
    height, width = shown[0].window[3], shown[0].window[2]
    out = images[0].new_empty((len(images), images[0].shape[0], height, width))
    for row, image, each in zip(out, images, shown, strict=True):
        _resample_row(image, each, interpolation, row)
    return out


def _resample_row(image: Levels, shown: Geometry, interpolation: str, out: Levels) -> None:
    x, y, width, height = shown.box
    part = image[None, :, y : y + height, x : x + width]
    if interpolation == "bicubic" and _is_down_first(shown):
        part = resized(part, (shown.full[0], width), interpolation)
    part = resized(part, shown.full, interpolation)[0]
    left, top, wide, tall = shown.window
    if (left, top, wide, tall) != (0, 0, *reversed(shown.full)):
        part = cropped(part, top, left, (tall, wide))
    out.copy_(part.flip(-1) if shown.flip else part)


def resized(images: Levels, size: tuple[int, int], interpolation: str) -> Levels:
    """Resize all images to `size`; returns them unchanged if they have it."""
    if tuple(images.shape[-2:]) == size:
        return images
    if levels.is_faster_by_rows(images):
        return functional.interpolate(images, size, mode=interpolation, antialias=True)
    numbers = functional.interpolate(images.float(), size, mode=interpolation, antialias=True)
    return _levels(numbers)


def cropped(images: Levels, top: int, left: int, size: tuple[int, int]) -> Levels:
    """Part of `size` at (top, left), with zeros beyond the edges.

    A view if the part lies within the images.
    """
    height, width = images.shape[-2:]
    inside = images[..., max(0, top) : max(0, top + size[0]), max(0, left) : max(0, left + size[1])]
    if tuple(inside.shape[-2:]) == size:
        return inside
    before = max(0, -left), max(0, -top)
    after = max(0, left + size[1] - width), max(0, top + size[0] - height)
    return functional.pad(inside, (before[0], after[0], before[1], after[1]))


def _is_down_first(shown: Geometry) -> bool:
    """True if Pillow resizes the height before the width.

    A bicubic filter overshoots, and its results are clipped between the two, so the order changes pixels.
    """
    lost = shown.box[3] - shown.full[0]
    return lost > 0 and lost > 2 * (shown.box[2] - shown.full[1])


BOXES_NBYTES = 1 << 26
"""Largest size of the boxes that are resampled together; as float32 numbers they need four times as much."""


def _resample_boxes(images: Sequence[Levels], shown: Sequence[Geometry], interpolation: str) -> Levels:
    """Resample images of different sizes by products; see `resampled`."""
    order, parts = [], []
    for rows in _of_similar_boxes(shown, len(images[0])):
        width, height = (max(shown[row].box[side] for row in rows) for side in (2, 3))
        boxes = images[0].new_empty((len(rows), len(images[0]), height, width))  # weights beyond a box are zero
        placed = []
        for place, row in enumerate(rows):
            x, y, wide, tall = shown[row].box
            boxes[place, :, :tall, :wide].copy_(images[row][:, y : y + tall, x : x + wide])
            placed.append(replace(shown[row], box=(0, 0, wide, tall)))
        parts.append(resample_by_products(boxes, placed, interpolation))
        order += rows
    return torch.cat(parts).index_select(0, uploaded(np.argsort(order), parts[0].device))


def _of_similar_boxes(shown: Sequence[Geometry], channels: int) -> Iterator[list[int]]:
    """Rows in groups whose boxes differ little in size.

    Little of the work is then for empty places.
    """
    sizes = [each.box[2:] for each in shown]
    rows: list[int] = []
    width = height = 0
    for row in sorted(range(len(shown)), key=lambda row: sizes[row][0] * sizes[row][1], reverse=True):
        wider, taller = max(width, sizes[row][0]), max(height, sizes[row][1])
        is_full = (len(rows) + 1) * channels * wider * taller > BOXES_NBYTES
        if rows and (is_full or width * height > 4 * sizes[row][0] * sizes[row][1]):
            yield rows
            rows, wider, taller = [], *sizes[row]
        rows.append(row)
        width, height = wider, taller
    yield rows


def resample_by_products(images: Levels, shown: Sequence[Geometry], interpolation: str) -> Levels:
    """Resample by two matrix products; see `resampled`.

    For bicubic filters, the order of the axes is Pillow's.
    """
    down_first = np.array([interpolation == "bicubic" and _is_down_first(each) for each in shown])
    if down_first.all() or not down_first.any():
        return _products(images, shown, interpolation, down_first=bool(down_first[0]))
    out = images.new_empty((*images.shape[:2], shown[0].window[3], shown[0].window[2]))
    for wanted in (False, True):
        rows = np.flatnonzero(down_first == wanted)
        at = uploaded(rows, images.device)
        some = [shown[row] for row in rows.tolist()]
        out.index_copy_(0, at, _products(images.index_select(0, at), some, interpolation, down_first=wanted))
    return out


def _products(images: Levels, shown: Sequence[Geometry], interpolation: str, *, down_first: bool) -> Levels:
    batch, channels, height, width = images.shape
    axes = torch.tensor([_axes(each) for each in shown], dtype=torch.float32, device="cpu")
    places = uploaded(axes, images.device)
    across = _weights(places[:, 0], width, shown[0].window[2], interpolation).transpose(1, 2)
    down = _weights(places[:, 1], height, shown[0].window[3], interpolation)
    # Lines of all channels are neighbors, so each axis is one product.
    numbers = images.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    # Rounded between the axes, as by Pillow.
    if down_first:
        lines = _round(down @ numbers.view(batch, height, -1))
        done = lines.view(batch, -1, width) @ across
    else:
        lines = _round(numbers.view(batch, -1, width) @ across)
        done = down @ lines.view(batch, height, -1)
    lined = _levels(done).view(batch, down.shape[1], channels, -1)
    return lined.transpose(1, 2).contiguous()


def _axes(shown: Geometry) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Box start and length, full length, window start and flip, per axis."""
    x, y, width, height = shown.box
    return (x, width, shown.full[1], shown.window[0], shown.flip), (y, height, shown.full[0], shown.window[1], 0)


def _weights(places: torch.Tensor, length: int, out: int, interpolation: str) -> torch.Tensor:
    """Pillow's weights of input pixels for output pixels, (batch, out, length)."""
    start, box, full, offset, flip = (column[:, None, None] for column in places.unbind(1))
    at = torch.arange(out, device=places.device, dtype=torch.float32)[None, :, None]
    at = torch.where(flip > 0, out - 1 - at, at) + offset
    scale = box / full
    spread = scale.clamp(min=1.0)
    center = (at + 0.5) * scale
    reach = spread * (2.0 if interpolation == "bicubic" else 1.0)
    pixel = torch.arange(length, device=places.device, dtype=torch.float32)[None, None, :] - start
    first = (center - reach + 0.5).floor().clamp(min=0)
    last = torch.minimum((center + reach + 0.5).floor(), box)
    filtered = _bicubic if interpolation == "bicubic" else _triangle
    weights = filtered((pixel - center + 0.5) / spread)
    weights = torch.where((pixel >= first) & (pixel < last) & (at >= 0) & (at < full), weights, 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)


def _triangle(x: torch.Tensor) -> torch.Tensor:
    return (1.0 - x.abs()).clamp(min=0.0)


def _bicubic(x: torch.Tensor) -> torch.Tensor:
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return torch.where(x < 1.0, near, torch.where(x < 2.0, far, 0.0))


def _round(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.add_(0.5).floor_().clamp_(0.0, 255.0)


def _levels(numbers: torch.Tensor) -> Levels:
    return _round(numbers).to(torch.uint8)
