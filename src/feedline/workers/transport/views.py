"""Descriptions of tensors, arrays and buffers, to rebuild them over received bytes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Region:
    """Writable bytes in this process, shared by every view built over them."""

    __slots__ = ("_storage", "memory")

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self._storage: torch.UntypedStorage | None = None

    @property
    def storage(self) -> torch.UntypedStorage:
        """Storage over the region, the same for all of its tensors."""
        if self._storage is None:
            self._storage = torch.from_numpy(self.memory).untyped_storage()
        return self._storage


class TensorView(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool

    def build(self, region: Region, offset: int) -> torch.Tensor:
        dtype = torch_dtypes()[self.dtype]
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(region.storage, offset // dtype.itemsize, self.shape, self.stride)
        return tensor.requires_grad_() if self.requires_grad else tensor


class ArrayView(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def build(self, region: Region, offset: int) -> NDArray[Any]:
        return np.ndarray(self.shape, self.dtype, region.memory, offset, self.strides)


class StorageView(NamedTuple):
    nbytes: int

    def build(self, region: Region, offset: int) -> torch.UntypedStorage:
        if self.nbytes == len(region.memory):
            return region.storage
        return torch.from_numpy(region.memory[offset : offset + self.nbytes]).untyped_storage()


class BufferView(NamedTuple):
    nbytes: int

    def build(self, region: Region, offset: int) -> memoryview:
        return region.memory[offset : offset + self.nbytes].data


View = TensorView | ArrayView | StorageView | BufferView
"""Description of one object without its bytes. `build(region, offset)` takes the byte offset of the first element."""


def base_array(buffer: memoryview) -> Bytes:
    """Array over the buffer that lives until its last view is dropped.

    A weak reference to the array therefore reports the end of its last view.
    """
    # Made from a buffer: views of an array that is a view itself would refer to the original array, not to it.
    return np.frombuffer(buffer, np.uint8)


@functools.cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """All dtypes of the installed torch, by printed name."""
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def tensor_over(memory: Bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Contiguous tensor over the given bytes."""
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(torch.from_numpy(memory).untyped_storage(), 0, shape)  # type: ignore[call-overload]
    return tensor
