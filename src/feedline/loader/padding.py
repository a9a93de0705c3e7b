"""Share of padding in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_MASKS = ("attention_mask", "mask", "padding_mask", "pixel_mask", "segments")
"""Usual names of masks; `padding_mask` is True on padding, the others are on data.

The `segments` of packed rows are 0 on padding.
"""


_LENGTHS = ("lengths", "length", "seq_lens")


_DEPTH = 3
"""Depth of containers searched for a mask: deeper ones belong to the samples."""


@dataclass(slots=True)
class PaddingSums:
    """Shares of padding, summed over the batches that were examined."""

    batches: int = 0
    total: float = 0.0

    def add(self, batch: Any) -> None:
        """Examine a batch."""
        try:
            share = padding_share(batch)
        except Exception:  # noqa: BLE001 - an unknown batch type: this figure is not worth an error
            return
        if share is not None:
            self.batches, self.total = self.batches + 1, self.total + share

    @property
    def share(self) -> float | None:
        """The mean share, 0 to 1; None if no batch has any."""
        return self.total / self.batches if self.batches else None


def padding_share(batch: Any) -> float | None:
    """Share of padding in a batch, 0 to 1.

    None if it has neither mask nor lengths. Only masks on the CPU are read: reading others would wait for the device.
    """
    for fields in _mappings(batch, _DEPTH):
        for name in _MASKS:
            share = _share_of_mask(fields.get(name))
            if share is not None:
                return 1 - share if name == "padding_mask" else share
        for name in _LENGTHS:
            share = _share_of_lengths(fields.get(name))
            if share is not None:
                return share
    return None


def _mappings(value: Any, depth: int) -> Iterator[Mapping[Any, Any]]:
    """Mappings and named tuples in a batch, outer ones first."""
    if isinstance(value, Mapping):
        yield value
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        yield value._asdict()
    if depth and isinstance(value, Mapping | tuple | list):
        parts = value.values() if isinstance(value, Mapping) else value
        for part in list(parts)[:16]:
            yield from _mappings(part, depth - 1)


def _share_of_mask(mask: Any) -> float | None:
    array = _array(mask)
    if array is None or array.ndim < 2 or not array.size:
        return None
    return 1 - float(np.count_nonzero(array)) / array.size


def _share_of_lengths(lengths: Any) -> float | None:
    """Share under the assumption that rows are padded to the longest one."""
    array = _array(lengths)
    if array is None or array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.max() <= 0:
        return None
    return 1 - float(array.mean()) / float(array.max())


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
        return value.detach().numpy() if plain and value.dtype is not torch.bfloat16 else None
    return value if isinstance(value, np.ndarray) else None
