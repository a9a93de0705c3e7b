"""The leaf formats of LitData, but pickle: from bytes to tensors, arrays, numbers, texts and pictures."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.datasets.decoding import text_of
from feedline.datasets.litdata_nested import nested
from feedline.datasets.mds_encodings import bare_image, image, images
from feedline.errors import ArgumentError

Decoder = Callable[[memoryview], Any]
T = TypeVar("T")

_TORCH = (
    *(torch.float32, torch.float32, torch.float64, torch.float64, torch.complex64, torch.complex64),
    *(torch.complex128, torch.complex128, torch.float16, torch.float16, torch.bfloat16, torch.uint8, torch.int8),
    *(torch.int16, torch.int16, torch.int32, torch.int32, torch.int64, torch.int64, torch.bool, torch.uint16),
)
"""The dtypes of tensors by LitData's number; those with two names in torch have two."""
_NUMPY = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    *("complex64", "complex128", "bool"),
)
"""The dtypes of arrays by LitData's number; those after these hold objects."""
_ENCODED = ("bytes", "file", "video", "audio", "nifti", "mesh", "pdf", "graph", "tifffile")
"""Files that are given as they are, for a transform to decode."""


def decoder(name: str) -> Decoder:
    """What decodes leaves of this format; ArgumentError for pickle, and for what is not known."""
    kind = name.partition(":")[0]
    if kind in _ENCODED:
        return bytes
    if kind == "no_header_tensor":
        return partial(_flat_tensor, _numbered(_TORCH, name))
    if kind == "no_header_numpy":
        return partial(_flat_array, np.dtype(_numbered(_NUMPY, name)))
    if kind == "pickle":
        raise ArgumentError("pickle, which may run any code and is never read")
    try:
        return _DECODERS[kind]
    except KeyError:
        raise ArgumentError(f"{name!r}, which is not known") from None


def is_picture(name: str) -> bool:
    """Whether leaves are the bytes of one image file."""
    return name.partition(":")[0] in ("jpeg", "image")


def token_dtype(name: str) -> torch.dtype:
    """The dtype of tokens that are stored one after the other."""
    kind = name.partition(":")[0]
    if kind == "no_header_tensor":
        return _numbered(_TORCH, name)
    if kind == "no_header_numpy":
        return torch.from_numpy(np.empty(0, _numbered(_NUMPY, name))).dtype
    raise ArgumentError(f"{name!r}, and tokens are flat tensors or arrays")


def _numbered(dtypes: Sequence[T], name: str) -> T:
    number = name.partition(":")[2]
    if not number.isdecimal() or int(number) >= len(dtypes):
        raise ArgumentError(f"{name!r}, which is not known")
    return dtypes[int(number)]


def _flat_tensor(dtype: torch.dtype, data: memoryview) -> torch.Tensor:
    out = torch.empty(len(data) // dtype.itemsize, dtype=dtype)
    if out.nbytes != len(data):
        raise ValueError(f"{len(data)} bytes are no whole number of {dtype}")
    if len(data):
        out.view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return out


def _tensor(data: memoryview) -> torch.Tensor:
    """The number of the dtype, the number of sides, and the sides, in big endian; then the values."""
    number, sides = struct.unpack_from(">II", data)
    shape = struct.unpack_from(f">{sides}I", data, 8)
    flat = _flat_tensor(_TORCH[number], data[8 + 4 * sides :])
    if prod(shape) != len(flat):
        raise ValueError(f"{len(flat)} numbers are no tensor of shape {shape}")
    return flat.reshape(shape)


def _flat_array(dtype: np.dtype[Any], data: memoryview) -> NDArray[Any]:
    return np.frombuffer(data, dtype).copy()


def _array(data: memoryview) -> NDArray[Any]:
    """As tensors, in little endian."""
    number, sides = struct.unpack_from("<II", data)
    shape = struct.unpack_from(f"<{sides}I", data, 8)
    return _flat_array(np.dtype(_NUMPY[number]), data[8 + 4 * sides :]).reshape(shape)


def _unpacked(layout: str, data: memoryview) -> Any:
    return struct.unpack(layout, data)[0]


_DECODERS: dict[str, Decoder] = {
    "bool": partial(_unpacked, "<?"),
    "int": partial(_unpacked, "<q"),
    "float": partial(_unpacked, "<d"),
    "str": text_of,
    "text": text_of,
    "json": nested,
    "tensor": _tensor,
    "numpy": _array,
    "pil": bare_image,
    "jpeg": image,
    "image": image,
    "jpeg_array": images,
}
