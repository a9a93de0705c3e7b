"""Crops and flips of a batch in one pass on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.dataset import Keys
from feedline.core.kernels import Int64s, take_planes
from feedline.core.rng import Draws, DrawsEach
from feedline.core.tensors import numpy_view
from feedline.transforms.geometry import RandomCrop, RandomHorizontalFlip, RandomVerticalFlip, fold
from feedline.transforms.steps import PlannedStep

FLIPS = (RandomHorizontalFlip, RandomVerticalFlip)


def leading_moves(steps: Sequence[PlannedStep]) -> list[PlannedStep]:
    """Leading crops and flips that one pass can execute.

    One crop at most, because a pass has one fill.
    """
    found: list[PlannedStep] = []
    for planned in takewhile(lambda planned: type(planned.step) in (*FLIPS, RandomCrop), steps):
        if type(planned.step) is RandomCrop and any(type(each.step) is RandomCrop for each in found):
            break
        found.append(planned)
    return found


def one_key(keys: Keys) -> int | None:
    """Key that all rows share, or None."""
    # As bytes: the comparison of NumPy takes a tenth of a whole crop.
    is_one = len(keys) > 0 and keys.tobytes() == keys[:1].tobytes() * len(keys)
    return int(keys[0]) if is_one else None


def moved(images: torch.Tensor, steps: Sequence[PlannedStep], keys: Keys) -> torch.Tensor:
    """Images after crops and flips; may share memory with `images`."""
    key = one_key(keys)
    if key is not None:
        part = _shared_crop(steps, key, *images.shape[-2:])
        if part is not None:
            return part.of(images)
        keys = keys[:1]
    crop = next((planned.step for planned in steps if isinstance(planned.step, RandomCrop)), None)
    size = images.shape[-2:] if crop is None else crop.size
    # Before the other arrays: malloc would place these into the hole that the last batch has left, and take new pages
    # from the system for each batch.
    out = torch.empty((*images.shape[:2], *size), dtype=images.dtype, device=images.device)
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
    fill = (0.0,) if crop is None else crop.levels(images.shape[1])
    return _taken(images, lines, columns, fill, out)


SHIFTED_NBYTES = 1 << 18
"""Size of a batch from which one copy and the borders take less time than torch's pad, which is one call."""


class _AxisRun(NamedTuple):
    """Neighboring lines or columns of an image, and padding around them."""

    start: int
    stop: int
    before: int = 0
    behind: int = 0
    is_reversed: bool = False

    @property
    def length(self) -> int:
        """Number of places, with those of the padding."""
        return self.before + self.stop - self.start + self.behind

    def reverse(self) -> _AxisRun:
        return self._replace(is_reversed=not self.is_reversed)

    def crop(self, start: int, length: int) -> _AxisRun:
        """Take `length` places from `start` on, with padding beyond the edges."""
        count = self.stop - self.start
        first, last = (min(max(at, 0), count) for at in (start, start + length))
        before = min(length, max(0, -start))
        behind = length - before - (last - first)
        if self.is_reversed:
            return _AxisRun(self.stop - last, self.stop - first, behind, before, is_reversed=True)
        return _AxisRun(self.start + first, self.start + last, before, behind)


class _SharedCrop(NamedTuple):
    """The same lines and columns of all images."""

    lines: _AxisRun
    columns: _AxisRun
    fill: float

    def of(self, images: torch.Tensor) -> torch.Tensor:
        """Crop the images; a view unless padded or flipped."""
        lines, columns = self.lines, self.columns
        edges = columns.before, columns.behind, lines.before, lines.behind
        keeps_size = (lines.length, columns.length) == images.shape[2:]
        if any(edges) and keeps_size and images.is_contiguous() and images.nbytes >= SHIFTED_NBYTES:
            part = self._shifted(images)
        else:
            part = images[..., lines.start : lines.stop, columns.start : columns.stop]
            part = torch.nn.functional.pad(part, edges, value=self.fill) if any(edges) else part
        axes = [axis for axis, span in ((-2, lines), (-1, columns)) if span.is_reversed]
        return part.flip(axes).contiguous() if axes else part

    def _shifted(self, images: torch.Tensor) -> torch.Tensor:
        """Crop contiguous images to their own size.

        torch's pad would write most items twice.
        """
        lines, columns = self.lines, self.columns
        out = torch.empty_like(images)
        # One run moves the items of all images. Those that leave their line end in the borders, which are filled then.
        shift = (lines.before - lines.start) * columns.length + columns.before - columns.start
        count = max(0, out.numel() - abs(shift))
        out.view(-1)[max(0, shift) :][:count].copy_(images.view(-1)[max(0, -shift) :][:count])
        for axis, span in ((-2, lines), (-1, columns)):
            for start, length in ((0, span.before), (span.length - span.behind, span.behind)):
                if length:
                    border = out.narrow(axis, start, length)
                    # A few columns are faster one by one than as a block of short lines.
                    for part in border.unbind(-1) if axis == -1 and length <= 8 else (border,):
                        part.fill_(self.fill)
        return out


def _shared_crop(steps: Sequence[PlannedStep], key: int, height: int, width: int) -> _SharedCrop | None:
    """Crop that all images share; None unless padding is one level."""
    lines, columns, fill = _AxisRun(0, height), _AxisRun(0, width), 0.0
    for planned in steps:
        step, draws = planned.step, Draws(planned.key(key))
        if isinstance(step, RandomCrop):
            top, left = step.corner(draws, lines.stop - lines.start, columns.stop - columns.start)
            lines, columns = lines.crop(top, step.size[0]), columns.crop(left, step.size[1])
            is_padded = any((lines.before, lines.behind, columns.before, columns.behind))
            if is_padded and (step.padding_mode != "constant" or isinstance(step.fill, tuple)):
                return None
            fill = 0.0 if isinstance(step.fill, tuple) else float(step.fill)
        elif draws.unit() < step.p:  # type: ignore[attr-defined] # one of `FLIPS`
            if isinstance(step, RandomHorizontalFlip):
                columns = columns.reverse()
            else:
                lines = lines.reverse()
    return _SharedCrop(lines, columns, fill)


def flip_in_place(images: torch.Tensor, steps: Sequence[PlannedStep], keys: Keys) -> bool:
    """Flip images within their memory.

    Returns False, and changes nothing, if a step is not a flip. Reads and writes only the images to be flipped.
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
    """Positions of the lines and columns of a random crop.

    Both have the shape (batch, side), and are -1 in constant padding.
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


def _taken(
    images: torch.Tensor, lines: Int64s, columns: Int64s, fill: Sequence[float], out: torch.Tensor
) -> torch.Tensor:
    batch, channels = images.shape[:2]
    lines, columns = (np.broadcast_to(each, (batch, each.shape[1])) for each in (lines, columns))
    empty = torch.tensor(fill, dtype=images.dtype, device="cpu").expand(channels).contiguous()
    source, value, target = (numpy_view(tensor) for tensor in (images.contiguous(), empty, out))
    take_planes(source, lines, columns, value, target, torch.get_num_threads())
    return out
