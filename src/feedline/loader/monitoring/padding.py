"""Share of padding in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from time import monotonic_ns
from typing import Any

import numpy as np
import torch

from feedline.core.batch import BatchResult, Padding
from feedline.core.telemetry import BATCH, MAIN, PLACES

_MASKS = {"attention_mask": 2, "mask": 2, "padding_mask": 2, "pixel_mask": 3, "segments": 2}
"""Usual names of masks, and their dimensions; `padding_mask` is True on padding, the others are on data.

The `segments` of packed rows are 0 on padding. A mask with other dimensions is of something else, such as segmentation.
"""


_OF_PACKED_ROWS = ("pixel_mask", "segments")
"""Masks whose rows are no samples of one length: images have two, and packed rows many samples."""


_LENGTHS = ("lengths", "length", "seq_lens")


_NAMES = frozenset((*_MASKS, *_LENGTHS))


_DEPTH = 3
"""Depth of containers searched for a mask: deeper ones belong to the samples."""


_MOST_PARTS = 16
"""Number of parts of a container that are searched."""


_WITHOUT_FIELDS = frozenset((torch.Tensor, np.ndarray, int, float, bool, str, bytes, type(None)))


@dataclass(slots=True)
class PaddingSums:
    """Places, and padded ones, summed over the batches that report them."""

    padded: int = 0
    places: int = 0
    uneven: int = 0

    def add(self, padding: Padding) -> None:
        """Add the counts of a batch."""
        self.padded, self.places = self.padded + padding.padded, self.places + padding.places
        self.uneven += padding.uneven

    @property
    def share(self) -> float | None:
        """Share of padding, 0 to 1; None without padded batches."""
        return self.padded / self.places if self.places else None

    @property
    def uneven_share(self) -> float | None:
        """See `Stats`."""
        return self.uneven / self.places if self.places else None


class PaddingCounter:
    """Counts the padding of some batches.

    It takes at most 1 / `PAUSE_FACTOR` of the time. The batches between are not counted: masks may be large, and the
    search for them takes as long as many a batch.
    """

    __slots__ = ("_due_ns",)

    def __init__(self) -> None:
        self._due_ns = 0

    def add_to(self, result: BatchResult) -> BatchResult:
        """The result, with the counts of its batch if due."""
        if _has_no_padding(result.batch) or (began_ns := monotonic_ns()) < self._due_ns:
            return result
        padding = padding_counts(result.batch)
        ended_ns = monotonic_ns()
        self._due_ns = ended_ns + PAUSE_FACTOR * (ended_ns - began_ns)
        if padding is None:
            return result
        result.spans.append((BATCH + PLACES, 0, padding.places, MAIN))
        return result._replace(padding=padding)


PAUSE_FACTOR = 100
"""Pause after the count of a batch, as a multiple of the count's time."""


def padding_counts(batch: Any) -> Padding | None:
    """Padded places of a batch.

    None if it has neither mask nor lengths. Only masks on the CPU are read: reading others would wait for the device.
    """
    try:
        return _counts(batch)
    except Exception:  # noqa: BLE001 - an unknown batch type: this figure is not worth an error
        return None


def _has_no_padding(batch: Any) -> bool:
    """True for the usual batches without padding, found without a search."""
    kind = type(batch)
    if kind is dict:
        return _NAMES.isdisjoint(batch) and _WITHOUT_FIELDS.issuperset(map(type, batch.values()))
    return kind in _WITHOUT_FIELDS or ((kind is list or kind is tuple) and _WITHOUT_FIELDS.issuperset(map(type, batch)))


def _counts(batch: Any) -> Padding | None:
    for fields in _mappings(batch, _DEPTH):
        for name, dimensions in _MASKS.items():
            mask = _array(fields.get(name))
            if mask is not None and mask.ndim == dimensions and mask.size and mask.dtype.kind in "biuf":
                return _counts_of_mask(name, mask)
        for name in _LENGTHS:
            counts = _counts_of_lengths(fields.get(name))
            if counts is not None:
                return counts
    return None


def _counts_of_mask(name: str, mask: np.ndarray[Any, Any]) -> Padding:
    if name in _OF_PACKED_ROWS:
        return Padding(mask.size - int(np.count_nonzero(mask)), mask.size, 0)
    lengths = np.count_nonzero(mask, axis=1)
    if name == "padding_mask":
        lengths = mask.shape[1] - lengths
    data = int(lengths.sum())
    return Padding(mask.size - data, mask.size, int(lengths.max()) * len(lengths) - data)


def _mappings(value: Any, depth: int) -> Iterator[Mapping[Any, Any]]:
    """Mappings and named tuples in a batch, outer ones first."""
    if isinstance(value, Mapping):
        yield value
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        yield value._asdict()
    if depth and isinstance(value, Mapping | tuple | list):
        # A longer list has a part for each sample: they are alike.
        most = 1 if isinstance(value, list) and len(value) > _MOST_PARTS else _MOST_PARTS
        for part in islice(value.values() if isinstance(value, Mapping) else value, most):
            if type(part) not in _WITHOUT_FIELDS:
                yield from _mappings(part, depth - 1)


def _counts_of_lengths(lengths: Any) -> Padding | None:
    """Counts under the assumption that rows are padded to the longest one."""
    array = _array(lengths)
    if array is None or array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.max() <= 0:
        return None
    places = int(array.max()) * array.size
    padded = places - int(array.sum())
    return Padding(padded, places, padded)


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        return (value != 0 if value.dtype is torch.bfloat16 else value.detach()).numpy()
    return value if isinstance(value, np.ndarray) else None
