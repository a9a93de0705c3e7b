"""Collate functions that keep samples of different sizes in lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_convert

from feedline.collate.base import Collator, FieldWalk, Key, as_key_set
from feedline.collate.default import KeyPath
from feedline.core.tensors import Allocator


def ragged(keys: Sequence[Key] | None = None) -> RaggedCollator:
    """A collate function that does not stack fields of different sizes.

    Such a field becomes a list with one entry per sample; all other fields are collated as by `default`. These are the
    fields named by `keys`, of any type (a dict of boxes and labels stays a dict). Without `keys`, they are all tensors
    and arrays of at least one dimension. For `(image, target)` samples with images of one size, `ragged([1])` gives
    stacked images and a list of targets.
    """
    return RaggedCollator(as_key_set(keys))


@dataclass(frozen=True, slots=True)
class RaggedCollator(Collator):
    """The collate function that `ragged` returns."""

    keys: frozenset[Key] | None

    def __call__(self, samples: Sequence[Any], *, allocate: Allocator | None = None) -> Any:
        """The batch, with a list for every ragged field."""
        return _RaggedWalk(self.keys, allocate)(samples)


class _RaggedWalk(FieldWalk):
    __slots__ = ()

    def is_field(self, batch: Sequence[Any]) -> bool:
        return isinstance(batch[0], (torch.Tensor, np.ndarray)) and batch[0].ndim > 0

    def collate_field(self, batch: Sequence[Any], path: KeyPath) -> list[Any]:  # noqa: ARG002 - has no error to place
        return [default_convert(value) for value in batch]  # type: ignore[no-untyped-call]


def detection(samples: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """`(images, targets)` of `(image, target)` samples, without stacking.

    Each is a tuple with one entry per sample, as torchvision's detection models and training scripts expect.
    """
    return tuple(zip(*samples, strict=True))
