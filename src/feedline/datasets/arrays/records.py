"""Rows of arrays of records, times and texts.

A record (structured dtype) becomes a dict with an entry per field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.tensors import Allocator, allocate_tensor, numpy_view, torch_dtype

BatchedRows = torch.Tensor | list[Any] | dict[str, Any]
"""Rows of one array in a batch; for records, a dict of such rows."""


def delivered_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Dtype of the delivered values of a stored dtype.

    Numbers are in native byte order, times are int64 counts of their unit, and records consist of such fields.
    Conversion by `astype` is exact. TypeError names the field that no sample can hold.
    """
    if dtype.names is not None:
        fields = [(name, _field_dtype(dtype[name], name)) for name in dtype.names]
        return np.dtype(fields)
    if dtype.subdtype is not None:
        item, shape = dtype.subdtype
        return np.dtype((delivered_dtype(item), shape))
    if dtype.kind in "mM":
        return np.dtype(np.int64)
    native = dtype.newbyteorder("=")
    if torch_dtype(native) is None and dtype.kind not in "SUT" and not _is_text(dtype):
        raise TypeError(f"{dtype}")
    return native


def _field_dtype(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    try:
        return delivered_dtype(dtype)
    except TypeError as error:
        reason = str(error)
        inner = reason.startswith("the field ")
        raise TypeError(f"the field {name}.{reason[10:]}" if inner else f"the field {name} of {reason}") from None


def _is_text(dtype: np.dtype[Any]) -> bool:
    """True for the strings of variable length that h5py reads as objects."""
    metadata: Mapping[str, Any] = dtype.metadata or {}
    return dtype.kind == "O" and metadata.get("vlen") in (str, bytes)


def is_record(dtype: np.dtype[Any] | None) -> bool:
    """True for a structured dtype."""
    return dtype is not None and dtype.names is not None


def is_all_numbers(dtype: np.dtype[Any]) -> bool:
    """True for a delivered dtype of numbers, or a record of them."""
    if dtype.names is not None:
        return all(is_all_numbers(dtype[name].base) for name in dtype.names)
    return torch_dtype(dtype) is not None


def part_of(rows: NDArray[Any], allocate: Allocator) -> BatchedRows:
    """Rows of a delivered dtype as a part of a batch.

    Numbers are in memory from `allocate`, texts are lists. Trailing zeros of bytes of fixed width are removed, as in
    NumPy.
    """
    if rows.dtype.names is not None:
        return {name: part_of(rows[name], allocate) for name in rows.dtype.names}
    dtype = torch_dtype(rows.dtype)
    if dtype is None:
        texts: list[Any] = rows.tolist()
        return texts
    out = allocate(rows.shape, dtype)
    numpy_view(out)[...] = rows
    return out


def decode_texts(rows: NDArray[Any]) -> NDArray[Any]:
    """Replace the UTF-8 bytes in fields of objects by `str`, in place.

    UnicodeDecodeError for other bytes.
    """
    for name in rows.dtype.names or ():
        field = rows[name]
        if field.dtype.kind == "O":
            field[...] = np.frompyfunc(bytes.decode, 1, 1)(field)
        else:
            decode_texts(field)
    return rows


def samples_of(part: BatchedRows) -> Any:
    """Iterable over the samples of a part."""
    if isinstance(part, dict):
        fields = [samples_of(each) for each in part.values()]
        return (dict(zip(part, values, strict=True)) for values in zip(*fields, strict=True))
    return part.unbind() if isinstance(part, torch.Tensor) else part


class ArrayColumn(NamedTuple):
    """Form of the rows of an array, as stored and as delivered.

    They are numbers or records; `dtype` is None for records. Numbers in the other byte order are swapped after they are
    copied.
    """

    row_shape: tuple[int, ...]
    stored: np.dtype[Any]
    delivered: np.dtype[Any]
    dtype: torch.dtype | None

    @classmethod
    def of(cls, stored: np.dtype[Any], row_shape: tuple[int, ...]) -> ArrayColumn:
        """The column of an array in either byte order.

        TypeError names the part that no sample can hold.
        """
        native = delivered_dtype(stored)
        dtype = torch_dtype(native)
        if dtype is None and not is_record(native):
            raise TypeError(f"{stored}")
        return cls(row_shape, stored, native, dtype)

    def one(self, row: NDArray[Any]) -> Any:
        """Copy a row."""
        if self.dtype is None:
            return next(iter(samples_of(self._records(row[np.newaxis], allocate_tensor))))
        out = torch.empty(self.row_shape, dtype=self.dtype, device="cpu")
        numpy_view(out)[...] = row
        return out

    def empty(self, count: int, allocate: Allocator) -> torch.Tensor | NDArray[Any]:
        """Memory for the stored bytes of `count` rows.

        The memory is a tensor from `allocate`, or an array for records.
        """
        shape = count, *self.row_shape
        return np.empty(shape, self.stored) if self.dtype is None else allocate(shape, self.dtype)

    def part(self, filled: torch.Tensor | NDArray[Any], allocate: Allocator) -> BatchedRows:
        """The filled memory as a part of a batch."""
        if isinstance(filled, np.ndarray):
            return self._records(filled, allocate)
        if not self.stored.isnative:
            numpy_view(filled).byteswap(inplace=True)
        return filled

    def _records(self, rows: NDArray[Any], allocate: Allocator) -> BatchedRows:
        return part_of(rows.astype(self.delivered), allocate)


def memory_of(out: torch.Tensor | NDArray[Any]) -> NDArray[Any]:
    """The memory of a part as an array."""
    return out if isinstance(out, np.ndarray) else numpy_view(out)
