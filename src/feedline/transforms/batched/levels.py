"""Color arithmetic on whole batches, with the results of Pillow's.

Levels are float32 numbers without a fraction, (batch, channels, height, width): every product and sum of Pillow's
integer arithmetic is exact in them, so one conversion serves all steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from feedline.core.devices import uploaded
from feedline.transforms.color import BRIGHTNESS, CONTRAST, HUE, SATURATION


def is_faster_by_rows(tensor: torch.Tensor) -> bool:
    """True on the CPU, where one call per row is faster.

    A row fits into the CPU's cache. An accelerator is faster with few large launches.
    """
    return tensor.is_cpu


def luma(levels: torch.Tensor) -> torch.Tensor:
    """ITU-R 601 luma, (batch, 1, height, width), as Pillow's `convert("L")`."""
    red, green, blue = levels.unbind(1)
    sums = red.mul(19595.0).add_(green, alpha=38470.0).add_(blue, alpha=7471.0).add_(32768.0)
    return sums.mul_(2.0**-16).floor_()[:, None]


def adjusted(images: torch.Tensor, changes: Sequence[Sequence[tuple[int, float]]]) -> torch.Tensor:
    """Apply each row's adjustments (which, factor), in the row's order.

    Rows that have the same kind of adjustment at the same place in their order are changed together. Returns new
    memory.
    """
    levels = images.to(torch.float32, copy=True)
    if levels.shape[1] == 1:  # gray has neither saturation nor hue
        changes = [[each for each in row if each[0] in (BRIGHTNESS, CONTRAST)] for row in changes]
    for place in range(max(map(len, changes), default=0)):
        for which in (BRIGHTNESS, CONTRAST, SATURATION, HUE):
            rows = [row for row, each in enumerate(changes) if len(each) > place and each[place][0] == which]
            if rows:
                _change(levels, rows, which, [changes[row][place][1] for row in rows])
    return levels.to(images.dtype)


def _change(levels: torch.Tensor, rows: list[int], which: int, factors: list[float]) -> None:
    # Rows on the CPU are changed one by one: a row fits into the cache, and needs no copy of its own.
    if is_faster_by_rows(levels):
        for row, factor in zip(rows, factors, strict=True):
            _adjust(levels[row : row + 1], which, [factor])
        return
    there = uploaded(torch.tensor(rows, device="cpu"), levels.device)
    part = levels.index_select(0, there)
    _adjust(part, which, factors)
    levels.index_copy_(0, there, part)


def _adjust(levels: torch.Tensor, which: int, factors: Sequence[float]) -> None:
    if which == HUE:
        turns = torch.tensor([int(factor * 255) & 255 for factor in factors], device="cpu")
        turn_hue(levels, uploaded(turns, levels.device))
        return
    alpha = uploaded(torch.tensor(factors, dtype=torch.float32, device="cpu"), levels.device).view(-1, 1, 1, 1)
    if which == BRIGHTNESS:
        levels.mul_(alpha)
    else:
        start = luma(levels) if levels.shape[1] == 3 else levels
        start = _mean(start) if which == CONTRAST else start
        levels.sub_(start).mul_(alpha).add_(start)
    levels.clamp_(0.0, 255.0).floor_()


def _mean(gray: torch.Tensor) -> torch.Tensor:
    """Mean level of each image, rounded."""
    total = gray.sum((1, 2, 3), dtype=widest_float(gray.device))
    # By a tensor: CUDA multiplies by the reciprocal of a number, which moves means that are halves.
    mean = total / torch.full_like(total, gray[0].numel())
    return (mean + 0.5).floor().to(torch.float32).view(-1, 1, 1, 1)


def widest_float(device: torch.device) -> torch.dtype:
    """float64, except where a device lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def turn_hue(levels: torch.Tensor, turns: torch.Tensor) -> None:
    """Turn the hue by 255ths of the circle, in place."""
    most, hue, share = _to_hue(levels)
    hue = (hue + turns.view(-1, 1, 1)) & 255
    _from_hue(levels, most, hue, share)


def _to_hue(levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Brightest channel, hue in 255ths, and saturation in 255ths, (batch, height, width)."""
    exact = widest_float(levels.device)
    red, green, blue = levels.unbind(1)
    most = torch.maximum(torch.maximum(red, green), blue)
    span = most - torch.minimum(torch.minimum(red, green), blue)
    range_ = span.clamp(min=1.0)
    r, g, b = ((most - channel) / range_ for channel in (red, green, blue))
    is_red, is_green = red == most, green == most
    start = torch.where(is_red, 0.0, torch.where(is_green, 2.0, 4.0)).to(exact)
    plus = torch.where(is_red, b, torch.where(is_green, r, g))
    minus = torch.where(is_red, g, torch.where(is_green, b, r))
    sixth = (start + plus - minus).to(torch.float32)  # rounded as often as in Pillow
    turn = sixth.to(exact) / 6.0 + 1.0
    turn = torch.where(turn >= 1.0, turn - 1.0, turn).to(torch.float32)
    hue = torch.where(span == 0.0, 0, (turn.to(exact) * 255.0).long())
    share = ((span / most.clamp(min=1.0)).to(exact) * 255.0).floor()
    return most, hue, share


def _from_hue(levels: torch.Tensor, most: torch.Tensor, hue: torch.Tensor, share: torch.Tensor) -> None:
    exact = widest_float(levels.device)
    turned = torch.arange(256, dtype=torch.float64, device="cpu") * 6.0 / 255.0
    sectors = uploaded(turned.floor().long() % 6, levels.device)[hue]
    place = uploaded((turned - turned.floor()).float(), levels.device)[hue].to(exact)
    value, part = most.to(exact), (share / 255.0).to(torch.float32).to(exact)
    low = _whole(value * (1.0 - part))
    falling = _whole(value * (1.0 - (part * place).float().to(exact)))
    rising = _whole(value * (1.0 - part * (1.0 - place)))
    kinds = torch.stack((most, falling, low, low, rising, most))
    for channel, turn in enumerate((0, 4, 2)):  # the same six pieces, from another sector on
        torch.gather(kinds, 0, ((sectors + turn) % 6)[None], out=levels[:, channel][None])


def _whole(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers + 0.5).floor().to(torch.float32)


def blurred(levels: torch.Tensor, across: np.ndarray, down: np.ndarray) -> torch.Tensor:
    """Convolve each row with its kernels, (batch, taps); edges reflect."""
    batch, channels, height, width = levels.shape
    reach = across.shape[1] // 2, down.shape[1] // 2
    padded = functional.pad(levels, (reach[0], reach[0], reach[1], reach[1]), mode="reflect")
    lines = padded.reshape(1, batch * channels, *padded.shape[-2:])
    for kernels, shape in ((across, (1, -1)), (down, (-1, 1))):
        each = uploaded(kernels, levels.device).repeat_interleave(channels, 0)
        lines = functional.conv2d(lines, each.view(batch * channels, 1, *shape), groups=batch * channels)
    return lines.reshape(batch, channels, height, width).round_().clamp_(0.0, 255.0)
