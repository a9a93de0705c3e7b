"""Decoders of LitData's leaf formats, except pickle.

They turn bytes into tensors, arrays, numbers, strings and images. Nested lists and dicts are JSON, or litdata's
compact binary form: a tag, then the content.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.datasets.decoding import DecodeFunction, text_of
from feedline.datasets.shards.mds_values import bare_image, image, images
from feedline.errors import ArgumentError

_ReadValue = Callable[[memoryview, int], tuple[Any, int]]


_MAX_DEPTH = 64


_FIRST_LETTER = 0x21
"""Smallest first byte of JSON; the compact form begins with a smaller tag."""


def decode_nested(data: memoryview) -> Any:
    """Decode a nested value.

    ValueError, LookupError or struct.error for damaged bytes.
    """
    if not data or data[0] >= _FIRST_LETTER:
        return json.loads(bytes(data))
    return _value(data, 0, 0)[0]


def _value(data: memoryview, at: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"values are nested more than {_MAX_DEPTH} deep")
    tag = data[at]
    if tag == 5:
        return _mapping(data, at + 1, depth)
    if tag in _LEAVES:
        return _LEAVES[tag](data, at + 1)
    raise ValueError(f"byte {at} has the unknown tag {tag}")


def _mapping(data: memoryview, at: int, depth: int) -> tuple[dict[str, Any], int]:
    count, at = _count(data, at)
    mapping = {}
    for _ in range(count):
        key, at = _text(data, at)
        mapping[key], at = _value(data, at, depth + 1)
    return mapping, at


def _records(data: memoryview, at: int) -> tuple[list[dict[str, Any]], int]:
    """Dicts with the same keys, which are stored once."""
    rows, at = _count(data, at)
    count, at = _count(data, at)
    keys = []
    for _ in range(count):
        key, at = _text(data, at)
        keys.append(key)
    records = []
    for _ in range(rows):
        row = {}
        for key in keys:
            row[key], at = _RECORD_LEAVES[data[at]](data, at + 1)
        records.append(row)
    return records, at


def _count(data: memoryview, at: int) -> tuple[int, int]:
    """Read a length and check it against the size of the data."""
    (count,) = struct.unpack_from("<I", data, at)
    if count > len(data):
        raise ValueError(f"the length at byte {at} is {count}, in {len(data)} bytes")
    return count, at + 4


def _cut_part(data: memoryview, at: int, nbytes: int) -> tuple[memoryview, int]:
    if at + nbytes > len(data):
        raise ValueError(f"byte {at} begins a value of {nbytes} bytes, but {len(data) - at} are left")
    return data[at : at + nbytes], at + nbytes


def _text(data: memoryview, at: int) -> tuple[str, int]:
    count, at = _count(data, at)
    piece, at = _cut_part(data, at, count)
    return text_of(piece), at


def _json(data: memoryview, at: int) -> tuple[Any, int]:
    text, at = _text(data, at)
    return json.loads(text), at


def _texts(data: memoryview, at: int) -> tuple[list[str], int]:
    count, at = _count(data, at)
    texts = []
    for _ in range(count):
        text, at = _text(data, at)
        texts.append(text)
    return texts, at


def _numbers(dtype: str) -> _ReadValue:
    def read(data: memoryview, at: int) -> tuple[list[Any], int]:
        count, at = _count(data, at)
        piece, at = _cut_part(data, at, count * np.dtype(dtype).itemsize)
        return np.frombuffer(piece, dtype).tolist(), at

    return read


def _one(layout: str) -> _ReadValue:
    def read(data: memoryview, at: int) -> tuple[Any, int]:
        return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)

    return read


def _none(_: memoryview, at: int) -> tuple[None, int]:
    return None, at


_LEAVES: dict[int, _ReadValue] = {
    0: _json,
    1: _texts,
    2: _numbers("<i8"),
    3: _numbers("<f8"),
    4: _numbers("?"),
    6: _records,
    7: _text,
    8: _one("<q"),
    9: _one("<d"),
    10: _one("<?"),
    11: _none,
}


_RECORD_LEAVES: dict[int, _ReadValue] = {0x10: _none, 0x11: _text, 0x12: _one("<q"), 0x13: _one("<d"), 0x14: _one("<?")}


T = TypeVar("T")


_TORCH = (
    *(torch.float32, torch.float32, torch.float64, torch.float64, torch.complex64, torch.complex64),
    *(torch.complex128, torch.complex128, torch.float16, torch.float16, torch.bfloat16, torch.uint8, torch.int8),
    *(torch.int16, torch.int16, torch.int32, torch.int32, torch.int64, torch.int64, torch.bool, torch.uint16),
)
"""Dtypes of tensors by LitData's number; torch's aliases appear twice."""


_NUMPY = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    *("complex64", "complex128", "bool"),
)
"""Dtypes of arrays by LitData's number; higher numbers are object dtypes."""


_ENCODED = ("bytes", "file", "video", "audio", "nifti", "mesh", "pdf", "graph", "tifffile")
"""Formats of encoded files, which are returned as bytes for a transform to decode."""


def decode_function(name: str) -> DecodeFunction:
    """Function for a leaf format; ArgumentError for pickle and unknown formats."""
    kind = name.partition(":")[0]
    if kind in _ENCODED:
        return bytes
    if kind == "no_header_tensor":
        return partial(_flat_tensor, _dtype_of(_TORCH, name))
    if kind == "no_header_numpy":
        dtype = _dtype_of(_NUMPY, name)
        return partial(_flat_array, np.dtype(dtype))
    if kind == "pickle":
        raise ArgumentError("pickle, which can run arbitrary code and is never read")
    try:
        return _DECODERS[kind]
    except KeyError:
        raise ArgumentError(f"{name!r}, which is not known") from None


def is_image(name: str) -> bool:
    """True if leaves are encoded image files."""
    return name.partition(":")[0] in ("jpeg", "image")


def token_dtype(name: str) -> torch.dtype:
    """Dtype of tokens stored without a header."""
    kind = name.partition(":")[0]
    if kind == "no_header_tensor":
        return _dtype_of(_TORCH, name)
    if kind == "no_header_numpy":
        return torch.from_numpy(np.empty(0, _dtype_of(_NUMPY, name))).dtype
    raise ArgumentError(f"{name!r}, and tokens are flat tensors or arrays")


def _dtype_of(dtypes: Sequence[T], name: str) -> T:
    number = name.partition(":")[2]
    if not number.isdecimal() or int(number) >= len(dtypes):
        raise ArgumentError(f"{name!r}, which is not known")
    return dtypes[int(number)]


def _flat_tensor(dtype: torch.dtype, data: memoryview) -> torch.Tensor:
    out = torch.empty(len(data) // dtype.itemsize, dtype=dtype, device="cpu")
    if out.nbytes != len(data):
        raise ValueError(f"{len(data)} bytes are not a whole number of {dtype}")
    if len(data):
        out.view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return out


def _tensor(data: memoryview) -> torch.Tensor:
    """Decode a tensor: number of the dtype, rank, shape (big endian), values."""
    number, sides = struct.unpack_from(">II", data)
    shape = struct.unpack_from(f">{sides}I", data, 8)
    flat = _flat_tensor(_TORCH[number], data[8 + 4 * sides :])
    if prod(shape) != len(flat):
        raise ValueError(f"{len(flat)} numbers do not make a tensor of shape {shape}")
    return flat.reshape(shape)


def _flat_array(dtype: np.dtype[Any], data: memoryview) -> NDArray[Any]:
    return np.frombuffer(data, dtype).copy()


def _array(data: memoryview) -> NDArray[Any]:
    """Decode an array, stored like a tensor but in little endian."""
    number, sides = struct.unpack_from("<II", data)
    shape = struct.unpack_from(f"<{sides}I", data, 8)
    return _flat_array(np.dtype(_NUMPY[number]), data[8 + 4 * sides :]).reshape(shape)


def _unpack(layout: str, data: memoryview) -> Any:
    return struct.unpack(layout, data)[0]


_DECODERS: dict[str, DecodeFunction] = {
    "bool": partial(_unpack, "<?"),
    "int": partial(_unpack, "<q"),
    "float": partial(_unpack, "<d"),
    "str": text_of,
    "text": text_of,
    "json": decode_nested,
    "tensor": _tensor,
    "numpy": _array,
    "pil": bare_image,
    "jpeg": image,
    "image": image,
    "jpeg_array": images,
}
