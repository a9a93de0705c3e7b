"""Batch memory that samples are written into while they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from feedline.collate.default import default
from feedline.core.tensors import Allocator, allocate_tensor, uses_allocator


class RowBuffer:
    """Rows for the first tensors of `count` samples, taken in order.

    `collate` gives what default collate gives for the samples. If their first tensors are the rows, nothing is copied.
    """

    def __init__(self, count: int, allocate: Allocator) -> None:
        self._count, self._allocate = count, allocate
        self._batch: torch.Tensor | None = None
        self._rows: Sequence[torch.Tensor] = ()
        self._kind: tuple[tuple[int, ...], torch.dtype] | None = None
        self._taken: list[torch.Tensor] = []
        self._deferred: dict[Callable[[list[Any]], None], list[Any]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The next row; None if the batch cannot have such a row."""
        if self._batch is None:
            self._batch = self._memory((self._count, *shape), dtype)
            self._rows, self._kind = self._batch.unbind(), (shape, dtype)
        if len(self._taken) == self._count or self._kind != (shape, dtype):
            return None
        row = self._rows[len(self._taken)]
        self._taken.append(row)
        return row

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return (self._allocate if uses_allocator(self._allocate, nbytes) else allocate_tensor)(shape, dtype)

    def defer(self, write: Callable[[list[Any]], None], item: Any) -> None:
        """Let `write(items)` write this and other rows before they are collated."""
        self._deferred.setdefault(write, []).append(item)

    @property
    def taken(self) -> int:
        """Number of rows taken so far."""
        return len(self._taken)

    def give_back(self, taken: int) -> None:
        """Give back all rows but the first `taken`.

        They must not have been deferred.
        """
        del self._taken[taken:]

    def copied(self, tensor: Any) -> Any:
        """The next row, with the values of `tensor`.

        `tensor` itself if it does not fit.
        """
        if type(tensor) is not torch.Tensor or tensor.requires_grad or not tensor.is_cpu:
            return tensor
        row = None if self._batch is None else self.take(tuple(tensor.shape), tensor.dtype)
        return tensor if row is None else row.copy_(tensor)

    def collate(self, samples: Sequence[Any]) -> Any:
        """Default collate of the samples, after all deferred writes."""
        deferred, self._deferred = self._deferred, {}
        for write, items in deferred.items():
            write(items)
        if not self._holds(samples):
            return default(samples, allocate=None if self._allocate is allocate_tensor else self._allocate)
        rest = default([sample[1:] for sample in samples], allocate=self._allocate) if len(samples[0]) > 1 else []
        return [self._batch, *rest]

    def _holds(self, samples: Sequence[Any]) -> bool:
        """True if the samples are tuples beginning with the rows."""
        if not (len(samples) == self._count == len(self._taken) and all(type(sample) is tuple for sample in samples)):
            return False
        lengths = {len(sample) for sample in samples}
        return (
            lengths not in ({0}, {1})
            and len(lengths) == 1
            and all(sample[0] is row for sample, row in zip(samples, self._taken, strict=True))
        )
