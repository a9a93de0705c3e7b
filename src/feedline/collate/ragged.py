"""Collate functions that keep samples of different sizes in lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_convert

from feedline.collate.base import Collator, FieldWalk, Key, as_key_set
from feedline.collate.default import ARRAY_TYPES, KeyPath
from feedline.core.tensors import Allocator, empty_tensor, torch_dtype
from feedline.core.tree import map_leaves


def ragged(keys: Sequence[Key] | None = None) -> RaggedCollator:
    """A collate function that does not stack fields of different sizes.

    Such a field becomes a list with one entry per sample; all other fields are collated as by `default`. These are the
    fields named by `keys`, of any type (a dict of boxes and labels stays a dict). Without `keys`, they are all tensors
    and arrays of at least one dimension. For `(image, target)` samples with images of one size, `ragged([1])` gives
    stacked images and a list of targets. Entries are copies in writable memory, as stacked fields are; dataclasses and
    other objects are passed on.
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
        copies = map_leaves(partial(_copy, allocate=self.empty), list(batch), is_dataclass)
        return [default_convert(value) for value in copies]  # type: ignore[no-untyped-call]


def _copy(value: Any, allocate: Allocator | None) -> Any:
    """An array or tensor in memory of its own; other values unchanged.

    Samples may be views of the dataset's memory, or of a file that is mapped read-only.
    """
    if isinstance(value, np.ndarray):
        dtype = torch_dtype(value.dtype) if type(value) in ARRAY_TYPES else None
        if dtype is None:
            return value.copy()
        out = empty_tensor(value.shape, dtype, allocate)
        out.numpy()[...] = value
        return out
    if not isinstance(value, torch.Tensor) or value.requires_grad:  # torch refuses writes to leaves with a gradient
        return value
    if type(value) is not torch.Tensor or not _is_dense(value):
        return value.clone()
    return empty_tensor(tuple(value.shape), value.dtype, allocate).copy_(value)


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements alone, in their order, make the tensor."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.is_contiguous()


def detection(samples: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """`(images, targets)` of `(image, target)` samples, without stacking.

    Each is a tuple with one entry per sample, as torchvision's detection models and training scripts expect.
    """
    return tuple(zip(*samples, strict=True))
