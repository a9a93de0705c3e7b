"""Rows of a source that is a dataset, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from feedline import collate
from feedline.collate.batch_reads import BatchReader, reader_of
from feedline.core.dataset import BatchRead
from feedline.core.kernels import Int64s
from feedline.core.tensors import allocate_tensor
from feedline.core.tree import leaves, map_leaves
from feedline.datasets.resident.columns import check_dtype, dtype_of
from feedline.datasets.wrappers import samples_of
from feedline.errors import ArgumentError


class SourceRows:
    """Reads samples of a dataset, with the dtypes of sample 0.

    `dtype` is the dtype in which floating-point values are stored, if any. Picklable if the dataset is.
    """

    def __init__(self, source: Any, dtype: torch.dtype | None) -> None:
        self._source, self._dtype = source, dtype
        self._reader = _reader(source)
        self._first = _first_sample(source)
        self.template = number_leaves(self._first)
        """The containers of a sample, with the number of each leaf."""
        self._batch_template = map_leaves(int, collate.default([self.template]))
        self._dtypes = [*map(dtype_of, pick_leaves(self.template, self._first))]

    def first(self) -> list[Any]:
        """The columns of sample 0, which has been read."""
        return self._columns(collate.default([self._first]))

    def read(self, places: Int64s) -> list[Any]:
        """The columns of these samples; SampleError if sample 0 has another dtype."""
        if self._reader is not None:
            columns = self._columns(self._reader(BatchRead(places, allocate_tensor)))
            self._check(columns, "some sample")
            return columns
        samples = samples_of(self._source, places.tolist())
        batch = collate.default(samples)
        others = [row for row, sample in enumerate(samples) if self._differs(sample)]
        for row in others:
            self._check(pick_leaves(self.template, samples[row]), f"sample {places[row]}")
        if not others:
            return self._columns(batch)
        # The first sample of a batch decides the dtype of numbers: of [1, 2.1] it is float32, which would round 2.1.
        return [column[1:] for column in self._columns(collate.default([self._first, *samples]))]

    def _columns(self, batch: Any) -> list[Any]:
        columns = pick_leaves(self._batch_template, batch)
        return [column.detach() if isinstance(column, torch.Tensor) else column for column in columns]

    def _differs(self, sample: Any) -> bool:
        return [*map(dtype_of, pick_leaves(self.template, sample))] != self._dtypes

    def _check(self, values: Any, where: str) -> None:
        for number, (value, dtype) in enumerate(zip(values, self._dtypes, strict=True)):
            check_dtype(f"leaf {number} of {where}", dtype_of(value), dtype, self._dtype)


class ReadBlocks(torch.utils.data.Dataset[Any]):
    """Columns of blocks of samples."""

    def __init__(self, rows: SourceRows, blocks: Sequence[Int64s]) -> None:
        self._rows, self._blocks = rows, blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> list[Any]:
        return self._rows.read(self._blocks[number])


def number_leaves(sample: Any) -> Any:
    """The containers of a sample, with the number of each leaf."""
    numbers = iter(range(len(list(leaves(sample)))))
    return map_leaves(lambda _: next(numbers), sample)


def pick_leaves(template: Any, batch: Any) -> Iterator[Any]:
    """The parts of a sample or batch, by leaf of the template."""
    if isinstance(template, int):
        yield batch
    elif isinstance(template, Mapping):
        for key, part in template.items():
            yield from pick_leaves(part, batch[key])
    else:
        for part, value in zip(template, batch, strict=True):
            yield from pick_leaves(part, value)


def _reader(source: Any) -> BatchReader | None:
    reader = reader_of(source)
    if reader is not None and reader.uses_keys:
        raise _random_error(source)
    return reader


def _first_sample(source: Any) -> Any:
    """Sample 0; ArgumentError if a second read gives another sample."""
    sample, again = source[0], source[0]
    if not all(map(_is_same, leaves(sample), leaves(again))):
        raise _random_error(source)
    return sample


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(_without_nan(one), _without_nan(other))
    return bool(np.array_equal(np.asarray(one), np.asarray(other), equal_nan=np.asarray(one).dtype.kind in "fc"))


def _without_nan(tensor: torch.Tensor) -> torch.Tensor:
    is_float8 = tensor.is_floating_point() and tensor.itemsize == 1  # which lacks nan_to_num
    if tensor.dtype is torch.complex32:  # so does complex32
        tensor = tensor.to(torch.complex64)
    return torch.nan_to_num(tensor.float() if is_float8 else tensor)


def _random_error(source: Any) -> ArgumentError:
    return ArgumentError(
        f"samples of this {type(source).__name__} are random, and a DeviceDataset would repeat the first ones: leave"
        " out the random transform, and apply it to batches on the device (fl.transforms.OnBatch)"
    )
