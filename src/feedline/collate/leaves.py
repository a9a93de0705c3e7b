"""The leaves of default collate: equal tensors, arrays or numbers become one tensor, written where `empty` says.

Each function has a fast path for samples that are all of one kind, and hands everything else to torch, so that odd
input gives what torch gives: the same promotion of dtypes, the same exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.collate import collate_numpy_array_fn, collate_tensor_fn

from feedline.rows import Empty, torch_dtype, torch_empty, wants

_dtype_of = attrgetter("dtype")
_shape_of = attrgetter("shape")
_strides_of = attrgetter("strides")
_ARRAY_TYPES = {np.ndarray, np.memmap}
# np.uint64 is missing: torch takes no list of such scalars, and raises.
_SCALAR_TYPES = {
    *(np.bool_, np.uint8, np.uint16, np.uint32, np.int8, np.int16, np.int32, np.int64),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
}


def stack_tensors(batch: Sequence[torch.Tensor], empty: Empty | None) -> torch.Tensor:
    """`torch.stack`, into memory from `empty` where the result is plain CPU data without a gradient."""
    elem = batch[0]
    if elem.is_nested or elem.layout is not torch.strided:
        return collate_tensor_fn(batch)  # type: ignore[no-any-return]  # it raises
    if wants(empty, elem.nbytes * len(batch)) and _is_plain(batch):
        assert empty is not None
        out = empty((len(batch), *elem.shape), elem.dtype)
        try:
            return torch.stack(batch, out=out)  # type: ignore[arg-type]
        except RuntimeError:  # unequal shapes, or a gradient: torch decides below, without `out`
            pass
    return torch.stack(batch)  # type: ignore[arg-type]


def _is_plain(batch: Sequence[torch.Tensor]) -> bool:
    elem = batch[0]
    return (
        elem.is_cpu
        and not elem.is_quantized
        and set(map(type, batch)) == {torch.Tensor}
        and len(set(map(_dtype_of, batch))) == 1
    )


def stack_arrays(batch: Sequence[NDArray[Any]], empty: Empty | None) -> torch.Tensor:
    """One tensor of equal arrays; the same as stacking a tensor made from each."""
    elem = batch[0]
    dtype = torch_dtype(elem.dtype)
    if dtype is None and elem.dtype.kind in "SUO":
        return collate_numpy_array_fn(batch)  # type: ignore[no-any-return]  # it raises
    if dtype is None or not _are_alike(batch):
        return stack_tensors([torch.as_tensor(array) for array in batch], empty)
    out = (empty or torch_empty)((len(batch), *elem.shape), dtype)
    # Joining along the first dimension fills the same memory as stacking does, and saves one view per sample.
    np.concatenate(batch, out=out.numpy().reshape(len(batch) * elem.shape[0], *elem.shape[1:]))
    return out


def _are_alike(batch: Sequence[NDArray[Any]]) -> bool:
    return (
        batch[0].ndim > 0
        and set(map(type, batch)) <= _ARRAY_TYPES
        and len(set(map(_dtype_of, batch))) == 1
        and len(set(map(_shape_of, batch))) == 1
        # torch refuses negative strides
        and all(min(strides) >= 0 for strides in set(map(_strides_of, batch)))
    )


def stack_ints(batch: Sequence[int], empty: Empty | None) -> torch.Tensor:
    """int64, or bool where all are bool; int subclasses and mixtures as torch infers them."""
    if set(map(type, batch)) in ({int}, {bool}):
        numbers = np.array(batch)
        if numbers.dtype.kind in "bi":  # a number beyond 64 bits: torch raises below
            return _placed(numbers, empty)
    return torch.tensor(batch)


def stack_floats(batch: Sequence[float], empty: Empty | None) -> torch.Tensor:
    """float64, whatever the following samples are."""
    if set(map(type, batch)) == {float}:
        return _placed(np.array(batch), empty)
    return torch.tensor(batch, dtype=torch.float64)


def stack_scalars(batch: Sequence[np.generic], empty: Empty | None) -> torch.Tensor:
    """NumPy scalars keep their dtype."""
    kind = type(batch[0])
    if kind in _SCALAR_TYPES and set(map(type, batch)) == {kind}:
        return _placed(np.array(batch), empty)
    return torch.as_tensor(batch)


def _placed(numbers: NDArray[Any], empty: Empty | None) -> torch.Tensor:
    if empty is None or not wants(empty, numbers.nbytes):
        return torch.from_numpy(numbers)
    dtype = torch_dtype(numbers.dtype)
    assert dtype is not None
    out = empty(numbers.shape, dtype)
    out.numpy()[...] = numbers
    return out


def unchanged(batch: Sequence[Any], _: Empty | None) -> Sequence[Any]:
    """Strings and bytes stay what they are."""
    return batch
