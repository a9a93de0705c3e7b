"""Rows of arrays of records, times and texts.

A record (structured dtype) becomes a dict with an entry for each field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.tensors import Allocator, allocate_tensor, numpy_view, torch_dtype, within

Part = torch.Tensor | list[Any] | dict[str, Any]
"""Rows of one array in a batch; a dict of these for records."""


def delivered_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Dtype as which the values of a stored dtype are delivered.

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


def part_of(rows: NDArray[Any], allocate: Allocator) -> Part:
    """Rows of a delivered dtype as a part of a batch.

    Numbers are in memory from `allocate`, texts are lists. Bytes of fixed width end at the last byte that is not
    zero, as in NumPy.
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


def samples_of(part: Part) -> Any:
    """Iterable over the samples of a part."""
    if isinstance(part, dict):
        fields = [samples_of(each) for each in part.values()]
        return (dict(zip(part, values, strict=True)) for values in zip(*fields, strict=True))
    return part.unbind() if isinstance(part, torch.Tensor) else part


class RecordColumn:
    """Array of records in memory whose first dimension counts samples."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self._dtype = delivered_dtype(array.dtype)

    def row(self, index: int) -> Any:
        """Copy one row; the index must be valid."""
        return next(iter(samples_of(self._part(self.array[index : index + 1], allocate_tensor))))

    def take(self, indices: NDArray[np.int64], allocate: Allocator) -> Part:
        """Rows of `indices`, with numbers in memory from `allocate`.

        IndexError names an invalid index.
        """
        return self._part(self.array[within(indices, len(self.array), "an array")], allocate)

    def _part(self, rows: NDArray[Any], allocate: Allocator) -> Part:
        return part_of(rows.astype(self._dtype), allocate)
