"""`ragged` and `detection`: samples of different sizes kept apart, in lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_convert

from feedline.collate.base import Collator, FieldWalk, Key, checked_keys
from feedline.collate.default import Path
from feedline.core.tensors import Allocator


def ragged(keys: Sequence[Key] | None = None) -> RaggedCollator:
    """A collate function that keeps fields apart, as a list with one entry per sample, and stacks all else.

    Kept apart are the fields that `keys` names, whatever they hold (a dict of boxes and labels stays that dict), or
    every tensor and array with at least one dimension. `ragged([1])` suits `(image, target)` samples whose images are
    of one size: stacked images, a list of targets.
    """
    return RaggedCollator(checked_keys(keys))


@dataclass(frozen=True, slots=True)
class RaggedCollator(Collator):
    """What `ragged` returns."""

    keys: frozenset[Key] | None

    def __call__(self, samples: Sequence[Any], *, empty: Allocator | None = None) -> Any:
        """The batch, with a list of converted values in place of every field that is kept apart."""
        return _RaggedWalk(self.keys, empty)(samples)


class _RaggedWalk(FieldWalk):
    __slots__ = ()

    def is_field(self, batch: Sequence[Any]) -> bool:
        return isinstance(batch[0], (torch.Tensor, np.ndarray)) and batch[0].ndim > 0

    def collate_field(self, batch: Sequence[Any], path: Path) -> list[Any]:  # noqa: ARG002 - lists need no address
        return [default_convert(value) for value in batch]  # type: ignore[no-untyped-call]


def detection(samples: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """`(images, targets)` of `(image, target)` samples, each a tuple with one entry per sample, nothing stacked.

    This is what torchvision's detection models and training scripts take.
    """
    return tuple(zip(*samples, strict=True))
