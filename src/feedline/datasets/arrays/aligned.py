"""Aligned arrays as datasets.

Sample i consists of row i of each array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.dataset import (
    READS_BATCHES,
    READS_SAMPLES,
    Batch,
    BatchRead,
    Traits,
    TransformFunction,
    check_reads_batches,
)
from feedline.core.sample_transform import SampleTransform
from feedline.core.tensors import Allocator, allocate_tensor, as_indices, normalize_index
from feedline.datasets.arrays.records import BatchedRows, is_all_numbers, samples_of
from feedline.errors import ArgumentError


class _Single:
    """Single array: samples and batches are tensors."""

    def sample(self, parts: Sequence[Any]) -> Any:
        return parts[0]

    batch = sample


class _Unnamed:
    """Sequence of arrays: samples are tuples, batches are lists."""

    def sample(self, parts: Sequence[Any]) -> Any:
        return tuple(parts)

    def batch(self, parts: Sequence[Any]) -> Any:
        return list(parts)


@dataclass(frozen=True, slots=True)
class Named:
    """Arrays by name: samples and batches are dicts."""

    names: tuple[str, ...]

    def sample(self, parts: Sequence[Any]) -> Any:
        return dict(zip(self.names, parts, strict=True))

    batch = sample


Structure = _Single | _Unnamed | Named


def parse_structure(source: Any, single: tuple[type, ...]) -> tuple[Structure, list[Any]]:
    if isinstance(source, single) or not isinstance(source, (Mapping, Sequence)):
        return _Single(), [source]
    if not source:
        raise ArgumentError("at least one array is needed")
    if isinstance(source, Mapping):
        return Named(tuple(source)), list(source.values())
    return _Unnamed(), list(source)


def check_aligned(lengths: Sequence[int], labels: Sequence[str], remedy: str = "") -> None:
    if len(set(lengths)) > 1:
        each = ", ".join(f"{label} has {length}" for label, length in zip(labels, lengths, strict=True))
        raise ArgumentError(f"aligned arrays must have one length, but {each}{remedy}")


class AlignedArrays(torch.utils.data.Dataset[Any]):
    """Dataset of aligned arrays; samples have the structure of the sources.

    Each sample is in its own memory. `dtypes` are the dtypes of the delivered rows of each array, None for rows that
    are not numbers. A subclass reads the rows.
    """

    def __init__(
        self,
        structure: Structure,
        dtypes: Sequence[np.dtype[Any] | None],
        length: int,
        transform: TransformFunction | None,
        *,
        has_ranges: bool = True,
    ) -> None:
        self._structure, self._length = structure, length
        numbers = all(dtype is not None and is_all_numbers(dtype) for dtype in dtypes)
        # Made once: each batch asks for them.
        self._traits = replace(READS_BATCHES, reads_batches=numbers, has_ranges=has_ranges)
        self._traits_with_transform = replace(READS_SAMPLES, has_ranges=has_ranges)
        self.transform = transform

    def _take(self, indices: NDArray[np.int64], allocate: Allocator) -> list[BatchedRows]:
        """Rows of each array, in the order of `indices`.

        Numbers are in memory from `allocate`. IndexError names an invalid index.
        """
        raise NotImplementedError

    def _one(self, at: int) -> Sequence[Any]:
        """Row `at` of each array, in its own memory; `at` is valid."""
        raise NotImplementedError

    @property
    def transform(self) -> TransformFunction | None:
        """The transform of each sample."""
        return self._step.transform

    @transform.setter
    def transform(self, transform: TransformFunction | None) -> None:
        self._step = SampleTransform(transform)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, in its own memory; negative indices count from the end."""
        at = normalize_index(index, self._length, type(self).__name__)
        return self._step(self._structure.sample(self._one(at)), None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples of `indices`, read in one pass over the arrays.

        Samples share memory only with each other.
        """
        parts = self._take(as_indices(indices), allocate_tensor)
        samples = map(self._structure.sample, zip(*map(samples_of, parts), strict=True))
        return [self._step(sample, row) for row, sample in enumerate(samples)]

    @property
    def traits(self) -> Traits:
        """Traits: batches need numbers, and no transform."""
        return self._traits if self._step.transform is None else self._traits_with_transform

    def read_batch(self, request: BatchRead) -> Batch:
        """Collated batch, read in one pass; TypeError if `traits` exclude batches."""
        check_reads_batches(self)
        return self._structure.batch(self._take(request.indices, request.allocate))
