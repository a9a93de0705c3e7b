"""Crops and flips of a batch in one pass on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import kernels
from feedline.core.dataset import Keys
from feedline.core.kernels import Int64s
from feedline.core.rng import DrawsEach
from feedline.core.tensors import numpy_view
from feedline.transforms.geometry import RandomCrop, RandomHorizontalFlip, RandomVerticalFlip, fold
from feedline.transforms.steps import PlannedStep

FLIPS = (RandomHorizontalFlip, RandomVerticalFlip)


def leading_moves(steps: Sequence[PlannedStep]) -> list[PlannedStep]:
    """The crops and flips at the beginning that one pass can do.

    One crop at most, since each has its fill.
    """
    found: list[PlannedStep] = []
    for planned in takewhile(lambda planned: type(planned.step) in (*FLIPS, RandomCrop), steps):
        if type(planned.step) is RandomCrop and any(type(each.step) is RandomCrop for each in found):
            break
        found.append(planned)
    return found


def distinct(keys: Keys) -> Keys:
    """The keys; a single one, for one draw, if all are equal."""
    return keys[:1] if len(keys) > 1 and (keys == keys[0]).all() else keys


def moved(images: torch.Tensor, steps: Sequence[PlannedStep], keys: Keys) -> torch.Tensor:
    """The images after crops and flips; a view if none is copied."""
    keys = distinct(keys)
    crop = next((planned.step for planned in steps if isinstance(planned.step, RandomCrop)), None)
    size = images.shape[-2:] if crop is None else crop.size
    # Before the other arrays: malloc would place these into the hole that the last batch has left, and take new pages
    # from the system for each batch.
    out = torch.empty((*images.shape[:2], *size), dtype=images.dtype)
    lines, columns = (np.arange(length)[None] for length in images.shape[-2:])
    is_moved = False
    for planned in steps:
        step, draws = planned.step, DrawsEach(planned.keys(keys))
        if isinstance(step, RandomCrop):
            lines, columns = cropped(step, draws, lines, columns)
            is_moved = True
            continue
        assert isinstance(step, FLIPS)
        flips = draws.unit() < step.p
        if not flips.any():
            continue
        is_moved = True
        if isinstance(step, RandomHorizontalFlip):
            columns = _flipped(columns, flips)
        else:
            lines = _flipped(lines, flips)
    if not is_moved:
        return images
    line_run, column_run = _run(lines), _run(columns)
    if line_run is not None and column_run is not None:
        del out  # for the copy
        return _box(images, line_run, column_run)
    fill = (0.0,) if crop is None else crop.fill if isinstance(crop.fill, tuple) else (crop.fill,)
    return _taken(images, lines, columns, fill, out)


def flip_in_place(images: torch.Tensor, steps: Sequence[PlannedStep], keys: Keys) -> bool:
    """Flip images within their memory.

    Returns False, with nothing done, if a step is not a flip. Only the images that are flipped are read and written.
    """
    if any(type(planned.step) not in FLIPS for planned in steps):
        return False
    axes: dict[int, list[int]] = {}
    for planned in steps:
        step = planned.step
        assert isinstance(step, FLIPS)
        axis = -1 if isinstance(step, RandomHorizontalFlip) else -2
        for row in np.flatnonzero(DrawsEach(planned.keys(keys)).unit() < step.p).tolist():
            turned = axes.setdefault(row, [])
            turned.remove(axis) if axis in turned else turned.append(axis)
    for row, turned in axes.items():
        if turned:  # one image at a time: its copy stays in the cache
            image = images[row]
            image.copy_(image.flip(turned))
    return True


def cropped(step: RandomCrop, draws: DrawsEach, lines: Int64s, columns: Int64s) -> tuple[Int64s, Int64s]:
    """Lines and columns, (batch, side), of a random crop.

    They are -1 beyond the edges of constant padding.
    """
    corners = step.corner(draws, lines.shape[1], columns.shape[1])
    parts = []
    for all_places, corner, side in zip((lines, columns), corners, step.size, strict=True):
        length = all_places.shape[1]
        chosen = corner[:, None] + np.arange(side)
        if step.padding_mode != "constant":
            chosen, inside = fold(chosen, length, step.padding_mode), None
        else:
            inside = (chosen >= 0) & (chosen < length)
            inside = None if inside.all() else inside
            chosen = chosen if inside is None else np.where(inside, chosen, 0)
        if len(all_places) == 1 and all_places[0, 0] == 0:  # nothing has been flipped: each place is its own number
            part = chosen
        else:
            rows = np.zeros(1, np.int64) if len(all_places) == 1 else np.arange(len(all_places))
            part = all_places[rows[:, None], chosen]
        parts.append(part if inside is None else np.where(inside, part, -1))
    return parts[0], parts[1]


def _flipped(places: Int64s, flips: NDArray[np.bool_]) -> Int64s:
    return places[:, ::-1] if flips.all() else np.where(flips[:, None], places[:, ::-1], places)


def _run(places: Int64s) -> tuple[int, int, bool] | None:
    """First, end and direction of neighbors that are alike in all images."""
    if len(places) > 1:
        return None
    first, last = int(places[0, 0]), int(places[0, -1])
    is_down = last < first
    steps = np.diff(places[0])
    if min(first, last) < 0 or not (steps == (-1 if is_down else 1)).all():
        return None
    return min(first, last), max(first, last) + 1, is_down


def _box(images: torch.Tensor, lines: tuple[int, int, bool], columns: tuple[int, int, bool]) -> torch.Tensor:
    """The same box of all images; a view unless it is flipped."""
    box = images[..., lines[0] : lines[1], columns[0] : columns[1]]
    axes = [axis for axis, (*_, is_down) in ((-2, lines), (-1, columns)) if is_down]
    return box.flip(axes).contiguous() if axes else box


def _taken(
    images: torch.Tensor, lines: Int64s, columns: Int64s, fill: Sequence[float], out: torch.Tensor
) -> torch.Tensor:
    batch, channels = images.shape[:2]
    lines, columns = (np.broadcast_to(each, (batch, each.shape[1])) for each in (lines, columns))
    empty = torch.tensor(fill, dtype=images.dtype).expand(channels).contiguous()
    source, value, target = (numpy_view(tensor) for tensor in (images.contiguous(), empty, out))
    kernels.take_planes(source, lines, columns, value, target, torch.get_num_threads())
    return out
