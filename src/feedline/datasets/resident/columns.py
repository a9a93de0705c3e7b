"""Columns of samples: rows in device memory, the rest in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.devices import has_streams, synchronize_in_thread, take_rows, uploaded
from feedline.core.kernels import Int64s, gather_rows
from feedline.core.tensors import Allocator, numpy_view, supported_view, torch_dtype
from feedline.errors import SampleError


class Column(Protocol):
    """The values of one leaf of all samples."""

    def take(self, places: Int64s, unstored: Any, allocate: Allocator) -> Any:
        """The batch of the values at `places`.

        `unstored` has the values of the places that are not stored, in the order of the places.
        """

    def put(self, places: Int64s, values: Any) -> None:
        """Store the values of a batch at `places`."""

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes on the device, and in host memory."""


class TensorColumn:
    """Rows of equal shape.

    The first rows are on the device, the next ones in host memory. Rows after these are not stored.
    """

    def __init__(self, resident: torch.Tensor, spilled: torch.Tensor) -> None:
        self.resident, self.spilled = resident, spilled

    def take(self, places: Int64s, unstored: torch.Tensor | None, allocate: Allocator) -> torch.Tensor:
        """See `Column`.

        The result is on the device, in memory of its own.
        """
        if len(places) and int(places.max()) >= len(self.resident):
            return self._take_mixed(places, unstored, allocate)
        if self.resident.is_cpu:
            return gather(self.resident, places, allocate)
        return take_rows([self.resident], places)[0]

    def put(self, places: Int64s, values: torch.Tensor) -> None:
        """See `Column`. Rows beyond the stored ones are dropped."""
        on_device = len(self.resident)
        _write(self.resident, places, values, places < on_device)
        _write(
            self.spilled, places - on_device, values, (places >= on_device) & (places < on_device + len(self.spilled))
        )

    @property
    def nbytes(self) -> tuple[int, int]:
        """See `Column`."""
        return self.resident.nbytes, self.spilled.nbytes

    def _take_mixed(self, places: Int64s, unstored: torch.Tensor | None, allocate: Allocator) -> torch.Tensor:
        on_device, stored = len(self.resident), len(self.resident) + len(self.spilled)
        device, shape = self.resident.device, (len(places), *self.resident.shape[1:])
        is_cpu = self.resident.is_cpu
        out = allocate(shape, self.resident.dtype) if is_cpu else self.resident.new_empty(shape)
        at = np.flatnonzero(places < on_device)
        if len(at):
            kept = self.resident.index_select(0, uploaded(places[at], device))
            _copy_rows(kept, out, at)
        at = np.flatnonzero((places >= on_device) & (places < stored))
        if len(at):
            rows = gather(self.spilled, places[at] - on_device, self._staging)
            # torch does not reuse its page-locked memory before the copy has ended: the rows may be dropped at once.
            _copy_rows(rows.to(device, non_blocking=has_streams(device)), out, at)
        if unstored is not None:
            _copy_rows(uploaded(unstored, device).to(out.dtype), out, np.flatnonzero(places >= stored))
        # A worker thread's stream differs from the loop's: the batch must be complete when the loop gets it.
        synchronize_in_thread(device)
        return out

    def _staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.resident.is_cuda)


class HostColumn:
    """Values that are not tensors, such as strings; always in host memory.

    A batch of them is of `kind`: default collate makes a list or a tuple.
    """

    def __init__(self, length: int, kind: type[Any]) -> None:
        self._values: list[Any] = [None] * length
        self._kind = kind

    def take(self, places: Int64s, unstored: Sequence[Any] | None, allocate: Allocator) -> Any:  # noqa: ARG002
        """See `Column`."""
        rest = iter(() if unstored is None else unstored)
        stored = len(self._values)
        return self._kind(self._values[place] if place < stored else next(rest) for place in places.tolist())

    def put(self, places: Int64s, values: Sequence[Any]) -> None:
        """See `Column`."""
        for place, value in zip(places.tolist(), values, strict=True):
            if place < len(self._values):
                self._values[place] = value

    @property
    def nbytes(self) -> tuple[int, int]:
        """See `Column`; the size of Python objects does not count."""
        return 0, 0


def gather(rows: torch.Tensor, places: Int64s, allocate: Allocator) -> torch.Tensor:
    """The rows of a CPU tensor at these places."""
    out = allocate((len(places), *rows.shape[1:]), rows.dtype)
    gather_rows(numpy_view(rows), places, numpy_view(out), threads=torch.get_num_threads())
    return out


def _write(rows: torch.Tensor, places: Int64s, values: torch.Tensor, chosen: NDArray[np.bool_]) -> None:
    """Write the chosen values to their places."""
    if not chosen.any():
        return
    at = torch.from_numpy(np.flatnonzero(chosen))
    picked = values if chosen.all() else values.index_select(0, at.to(values.device))
    _copy_rows(picked.to(rows.device, rows.dtype), rows, places[chosen])


def _copy_rows(values: torch.Tensor, rows: torch.Tensor, places: Int64s) -> None:
    """Copy values of the same dtype and device to these rows."""
    at = uploaded(places, rows.device)
    supported_view(rows).index_copy_(0, at, supported_view(values))  # torch has none for uint16 and some others


def check_alike(name: str, column: Column, values: Any) -> None:
    """Raise SampleError unless the values of a batch fit into the column."""
    if not isinstance(column, TensorColumn):
        return
    shape = tuple(column.resident.shape[1:])
    if isinstance(values, torch.Tensor) and tuple(values.shape[1:]) == shape:
        return
    got = tuple(values.shape[1:]) if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
    raise SampleError(
        f"{name} has shape {got} in some sample, and {shape} in the first: a DeviceDataset holds samples of one shape."
        " Crop, resize or pad them in the source"
    )


def dtype_of(value: Any) -> torch.dtype | None:
    """The dtype that default collation gives a value; None for text."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (np.ndarray, np.generic)):
        return torch_dtype(value.dtype.newbyteorder("="))
    kinds = ((bool, torch.bool), (int, torch.int64), (float, torch.float64))
    return next((dtype for kind, dtype in kinds if isinstance(value, kind)), None)


def stored_dtype(dtype: torch.dtype, floating: torch.dtype | None) -> torch.dtype:
    """The dtype of a column; `floating` replaces all floating-point ones."""
    return floating if floating is not None and dtype.is_floating_point else dtype


def check_dtype(name: str, dtype: torch.dtype | None, first: torch.dtype | None, floating: torch.dtype | None) -> None:
    """Raise SampleError if the dtype of the first value changes another."""
    if dtype is first:
        return
    if dtype is not None and first is not None and _holds(stored_dtype(first, floating), stored_dtype(dtype, floating)):
        return
    raise SampleError(
        f"{name} is {_kind(dtype)}, and {_kind(first)} in the first sample: a DeviceDataset holds values of one dtype,"
        " that of the first sample. Convert them in the source"
    )


def _holds(column: torch.dtype, dtype: torch.dtype) -> bool:
    try:
        return torch.promote_types(column, dtype) is column
    except RuntimeError:  # float8 and wide unsigned integers have no promotion
        return column is dtype


def _kind(dtype: torch.dtype | None) -> str:
    return "not a number" if dtype is None else str(dtype)
