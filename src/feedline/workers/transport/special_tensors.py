"""Pickling of quantized and sparse tensors.

Loading torch's own reductions of them warns. Torch also keeps every sparse tensor that it has loaded, until the next
`torch.load`: a loop would never free one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

from feedline.workers.transport.views import torch_dtypes

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def reduce_special(tensor: torch.Tensor) -> Any:
    """Reduction of a quantized or sparse CPU tensor; NotImplemented for others."""
    if not tensor.is_cpu or vars(tensor):
        return NotImplemented
    if tensor.is_quantized:
        return _reduce_quantized(tensor)
    if tensor.layout is torch.sparse_coo:
        return _reduce_coordinates(tensor.detach(), tensor.requires_grad)
    if tensor.layout in _COMPRESSED:
        return _reduce_compressed(tensor.detach(), tensor.requires_grad)
    return NotImplemented


def _reduce_coordinates(tensor: torch.Tensor, requires_grad: bool) -> Any:
    dimensions = tensor.sparse_dim(), tensor.dense_dim(), tuple(tensor.shape)
    return coordinates, (dimensions, tensor._indices(), tensor._values(), tensor.is_coalesced(), requires_grad)


def coordinates(
    dimensions: tuple[int, int, tuple[int, ...]],
    indices: torch.Tensor,
    values: torch.Tensor,
    coalesced: bool,
    requires_grad: bool,
) -> torch.Tensor:
    """Rebuild a sparse tensor of coordinates.

    `dimensions` are the number of sparse ones and of dense ones, and the shape.
    """
    # The public constructors of some versions warn that nothing is checked, even if a check is declined.
    tensor: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        *dimensions, indices, values, dtype=values.dtype, layout=torch.sparse_coo, device="cpu", is_coalesced=coalesced
    )
    return tensor.requires_grad_(requires_grad)


def _reduce_compressed(tensor: torch.Tensor, requires_grad: bool) -> Any:
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        places = tensor.crow_indices(), tensor.col_indices()
    else:
        places = tensor.ccol_indices(), tensor.row_indices()
    layout = _COMPRESSED.index(tensor.layout)
    return compressed, (layout, *places, tensor.values(), tuple(tensor.shape), requires_grad)


def compressed(
    layout: int,
    bounds: torch.Tensor,
    places: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Rebuild a tensor of compressed rows, columns or blocks."""
    tensor: torch.Tensor = torch.ops.aten._sparse_compressed_tensor_unsafe(
        bounds, places, values, shape, dtype=values.dtype, layout=_COMPRESSED[layout], device="cpu"
    )
    return tensor.requires_grad_(requires_grad)


def _reduce_quantized(tensor: torch.Tensor) -> Any:
    if tensor.qscheme() == torch.per_tensor_affine:
        numbers: tuple[Any, ...] = tensor.q_scale(), tensor.q_zero_point()
    else:
        numbers = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return quantized, (tensor.untyped_storage(), str(tensor.dtype), place, numbers)


def quantized(storage: UntypedStorage, dtype: str, place: tuple[Any, ...], numbers: tuple[Any, ...]) -> torch.Tensor:
    """Rebuild a quantized tensor.

    `numbers` are scale and zero point, or per channel: scales, zero points and the axis.
    """
    size, kind = place[1], torch_dtypes()[dtype]
    if len(numbers) == 2:
        empty = torch._empty_affine_quantized(size, scale=numbers[0], zero_point=numbers[1], dtype=kind)
    else:
        scales, zero_points, axis = numbers
        empty = torch._empty_per_channel_affine_quantized(
            size, scales=scales, zero_points=zero_points, axis=axis, dtype=kind
        )
    return empty.set_(storage, *place)


def typed_storage(untyped: UntypedStorage, dtype: str) -> TypedStorage:
    """Rebuild the storage that torch's reductions of tensor subclasses refer to."""
    return TypedStorage(wrap_storage=untyped, dtype=torch_dtypes()[dtype], _internal=True)  # type: ignore[no-untyped-call]
