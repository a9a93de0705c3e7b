"""Tensors and arrays: shared dtypes, allocation, and index checks."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.kernels import check_int64
from feedline.errors import SampleIndexError

Allocator = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""`allocate(shape, dtype)` returns an uninitialized, contiguous CPU tensor."""


def expect_torch_load(torch_version: str) -> None:
    """Ignore a warning of torch 2.4 and 2.5 about unpickled tensors.

    Tensors reach workers in pickles, as samples or indices do. A user's own calls of `torch.load` still warn.
    """
    if tuple(map(int, torch_version.split(".")[:2])) < (2, 6):
        warnings.filterwarnings("ignore", "You are using `torch.load` with", FutureWarning, r"torch\.storage")


expect_torch_load(torch.__version__)


def uses_allocator(allocate: Allocator | None, nbytes: int) -> bool:
    """True if a tensor of `nbytes` should come from the allocator.

    An allocator may set a lower bound, `smallest_nbytes`.
    """
    return allocate is not None and nbytes >= getattr(allocate, "smallest_nbytes", 0)


_SUPPORTED_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def allocate_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The default allocator: ordinary memory."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, allocate: Allocator | None) -> torch.Tensor:
    """An uninitialized tensor, from the allocator if it is large enough."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    chosen = allocate if allocate is not None and uses_allocator(allocate, nbytes) else allocate_tensor
    return chosen(shape, dtype)


@lru_cache(maxsize=256)
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """The torch dtype with the same memory layout.

    None if torch has none (strings, objects, big endian).
    """
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=256)
def _has_numpy(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return False
    return True


def numpy_view(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor as an array.

    If NumPy lacks the dtype (bfloat16), the array has another dtype of the same item size.
    """
    if _has_numpy(tensor.dtype):
        return tensor.numpy()
    return supported_view(tensor).numpy()


def supported_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with a dtype that every operator supports."""
    return tensor.view(_SUPPORTED_DTYPES[tensor.itemsize])


if TYPE_CHECKING:
    IndexArray = NDArray[np.int64]
else:
    IndexArray = np.ndarray


class TensorIndices(IndexArray):
    """Indices that a sampler yields as int64 tensors without dimensions."""


class ScalarIndices(IndexArray):
    """Indices that a sampler yields as `np.int64`."""


class BatchIndices(IndexArray):
    """Indices of a batch from another sequence than a list."""

    container: Any = None
    """The object of the batch sampler; None for views and copies."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.container is None else (with_container, (self.container,))


class BatchList(list[Any]):
    """The same for indices that are not integers."""

    container: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.container is None else (with_container, (self.container,))


def with_container(container: Sequence[Any] | NDArray[Any] | torch.Tensor) -> BatchIndices | BatchList:
    """The indices of a container, which `as_container` returns."""
    numbers = as_integers(list(container))
    indices = BatchList(container) if numbers is None else numbers.view(BatchIndices)
    indices.container = container
    return indices


def as_container(indices: Any) -> Any:
    """The object of the batch sampler, or else a list."""
    container = getattr(indices, "container", None)
    return as_yielded(indices) if container is None else container


def as_integers(items: list[Any]) -> NDArray[np.int64] | None:
    """The items as int64, or None.

    All must be `int`, `np.int64` or int64 tensors; the class of the array shows which of the three types they have.
    """
    types = set(map(type, items))
    if types <= {int}:
        try:
            return np.array(items, np.int64)
        except OverflowError:
            return None
    if types == {np.int64}:
        return np.array(items).view(ScalarIndices)
    if types == {torch.Tensor} and {(item.dtype, item.ndim) for item in items} == {(torch.int64, 0)}:
        return torch.stack(items).numpy(force=True).view(TensorIndices)
    return None


def as_yielded(indices: Any) -> Any:
    """Indices of the type that the sampler yields.

    Datasets may rely on it. An array becomes a list; other indices are returned unchanged.
    """
    if not isinstance(indices, np.ndarray):
        return indices
    if type(indices) is np.ndarray:
        plain_ints: list[Any] = indices.tolist()
        return plain_ints
    if isinstance(indices, BatchIndices):
        return indices.tolist() if indices.container is None else list(indices.container)
    plain = np.array(indices)
    return list(torch.from_numpy(plain)) if isinstance(indices, TensorIndices) else list(plain)


def as_indices(indices: Sequence[int]) -> NDArray[np.int64]:
    """Indices as int64; TypeError unless it is a list of integers.

    SampleIndexError for one that exceeds int64.
    """
    array = np.asarray(indices)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(f"indices must be a list of integers, not {array.ndim}-D {array.dtype}")
    check_int64(array)
    return array.astype(np.int64, copy=False)


def normalize_index(index: int, length: int, name: str) -> int:
    """`normalize_indices` for one index."""
    at = operator.index(index)
    if not -length <= at < length:
        raise SampleIndexError(f"index {at} is out of range for {name} with {length} samples")
    return at + length if at < 0 else at


def normalize_indices(indices: NDArray[np.int64], length: int, name: str) -> NDArray[np.int64]:
    """The indices, with negative ones counted from the end.

    SampleIndexError for one that is out of range; `name` is the dataset in the message.
    """
    if not len(indices) or indices.view(np.uint64).max() < length:  # as unsigned numbers, negative indices are huge
        return indices
    outside = (indices < -length) | (indices >= length)
    if outside.any():
        raise SampleIndexError(f"index {indices[outside][0]} is out of range for {name} with {length} samples")
    return np.where(indices < 0, indices + length, indices)
