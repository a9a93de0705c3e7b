"""Mixtures of neighboring samples of a batch: MixUp and CutMix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.dataset import Keys
from feedline.core.devices import uploaded
from feedline.core.rng import Draws
from feedline.errors import ArgumentError, SampleError
from feedline.transforms._arguments import argument_error, init_frozen
from feedline.transforms.batched import levels


@dataclass(frozen=True, slots=True, init=False)
class SampleMixing:
    """Base class of `MixUp` and `CutMix`.

    Each sample is mixed with the previous one in the batch, the first with the last. Its own share is drawn from
    Beta(alpha, alpha), and from its own key. Labels, int64 (batch,), become float32 (batch, num_classes): the shares of
    both classes. Labels that have shares already, (batch, num_classes), are mixed.
    """

    num_classes: int | None
    alpha: float

    def __init__(self, num_classes: int | None = None, alpha: float = 1.0) -> None:
        if num_classes is not None and num_classes < 1:
            raise argument_error(self, "num_classes", num_classes, "give the number of classes")
        if not 0 < alpha < math.inf:
            raise argument_error(self, "alpha", alpha, "give a number above 0")
        init_frozen(self, num_classes=num_classes, alpha=float(alpha))

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix images (batch, channels, height, width) and labels; one key per row."""
        draws = [Draws(key) for key in keys.tolist()]
        mixed, shares = self.mix(images, draws)
        shares_there = uploaded(shares.astype(np.float32), labels.device)
        return mixed, self._mix_labels(labels, shares_there)

    def mix(self, images: torch.Tensor, draws: list[Draws]) -> tuple[torch.Tensor, NDArray[np.float64]]:
        """Mix the images; also return the share of each row's own image."""
        raise NotImplementedError

    def _mix_labels(self, labels: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        if labels.ndim == 1 and not (labels.is_floating_point() or labels.is_complex()):
            labels = self._one_hot(labels)
        if not labels.is_floating_point() or labels.ndim != 2:
            raise SampleError(
                f"{type(self).__name__} mixes labels that are class indices (batch,) or shares (batch, num_classes);"
                f" these are {labels.dtype} of shape {tuple(labels.shape)}"
            )
        return torch.lerp(labels.roll(1, 0), labels, shares.to(labels.dtype)[:, None])

    def _one_hot(self, labels: torch.Tensor) -> torch.Tensor:
        if self.num_classes is None:
            raise ArgumentError(f"{type(self).__name__} needs num_classes to mix labels that are class indices")
        try:
            return torch.nn.functional.one_hot(labels.long(), self.num_classes).float()
        except RuntimeError as error:
            raise SampleError(
                f"{type(self).__name__}(num_classes={self.num_classes}) got labels from {int(labels.min())} to"
                f" {int(labels.max())}: classes are numbered from 0 to {self.num_classes - 1}"
            ) from error


@dataclass(frozen=True, slots=True, init=False)
class MixUp(SampleMixing):
    """Weighted mean of two samples (Zhang et al., arXiv:1710.09412).

    Shares are drawn from Beta(alpha, alpha). `num_classes` is needed for labels that are class indices. Images are
    floating-point numbers: put it after ToTensor or Normalize.
    """

    def mix(self, images: torch.Tensor, draws: list[Draws]) -> tuple[torch.Tensor, NDArray[np.float64]]:
        if not images.is_floating_point():
            raise SampleError(f"MixUp mixes numbers, not {images.dtype}: put it after ToTensor or Normalize")
        shares = np.array([beta(each, self.alpha) for each in draws])
        weights = uploaded(torch.from_numpy(shares).to(images.dtype), images.device).view(-1, 1, 1, 1)
        return torch.lerp(images.roll(1, 0), images, weights), shares


@dataclass(frozen=True, slots=True, init=False)
class CutMix(SampleMixing):
    """Rectangle of one sample pasted into another (Yun et al., arXiv:1905.04899).

    `num_classes` and `alpha` are those of MixUp. The share of a label is that of its pixels. Channels come first.
    """

    def mix(self, images: torch.Tensor, draws: list[Draws]) -> tuple[torch.Tensor, NDArray[np.float64]]:
        height, width = images.shape[-2:]
        boxes = np.array([self._box(each, height, width) for each in draws], np.int64).reshape(-1, 4)
        shares = 1.0 - (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / (height * width)
        if levels.is_faster_by_rows(images):
            return _paste(images, boxes), shares
        bounds = uploaded(boxes, images.device)[:, :, None]
        y, x = (torch.arange(length, device=images.device) for length in (height, width))
        down, across = (y >= bounds[:, 0]) & (y < bounds[:, 2]), (x >= bounds[:, 1]) & (x < bounds[:, 3])
        return torch.where((down[:, :, None] & across[:, None, :])[:, None], images.roll(1, 0), images), shares

    def _box(self, rng: Draws, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, bottom and right of a rectangle, clipped at the edges."""
        side = math.sqrt(1.0 - beta(rng, self.alpha))
        y, x = rng.below(height), rng.below(width)
        tall, wide = int(side * height) // 2, int(side * width) // 2
        return max(0, y - tall), max(0, x - wide), min(height, y + tall), min(width, x + wide)


def _paste(images: torch.Tensor, boxes: NDArray[np.int64]) -> torch.Tensor:
    out = images.clone()
    for row, (top, left, bottom, right) in enumerate(boxes.tolist()):
        out[row, :, top:bottom, left:right] = images[row - 1, :, top:bottom, left:right]
    return out


def beta(rng: Draws, alpha: float) -> float:
    """Draw a number from Beta(alpha, alpha).

    Sources: Jöhnk's algorithm up to 1, where it accepts most pairs; above it, Cheng's BB ("Generating beta variates
    with nonintegral shape parameters", 1978).
    """
    return _beta_small(rng, alpha) if alpha <= 1.0 else _beta_large(rng, alpha)


def _beta_small(rng: Draws, alpha: float) -> float:
    while True:
        # In logarithms: powers of 1 / alpha underflow for a small alpha.
        x, y = (math.log(1.0 - rng.unit()) / alpha for _ in range(2))
        top = max(x, y)
        total = math.log(math.exp(x - top) + math.exp(y - top)) + top
        if total <= 0.0:
            return math.exp(x - total)


def _beta_large(rng: Draws, alpha: float) -> float:
    rate, shift = 1.0 / math.sqrt(alpha), alpha + math.sqrt(alpha)
    while True:
        u, v = rng.unit(), rng.unit()
        if u == 0.0 or v == 0.0:
            continue
        odds = rate * math.log(u / (1.0 - u))
        w = alpha * math.exp(odds)
        bound = shift * odds - math.log(4.0) + 2.0 * alpha * math.log(2.0 * alpha / (alpha + w))
        if bound >= math.log(u * u * v):
            return w / (alpha + w)
