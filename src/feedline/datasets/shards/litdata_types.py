"""The leaf formats of LitData, but pickle: from bytes to tensors, arrays, numbers, texts and pictures.

LitData's compact form of nested lists and dicts: a tag, then what belongs to it; also plain JSON.
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

from feedline.datasets.decoding import text_of
from feedline.datasets.shards.mds import bare_image, image, images
from feedline.errors import ArgumentError

_Read = Callable[[memoryview, int], tuple[Any, int]]


_DEEPEST = 64


_FIRST_LETTER = 0x21
"""JSON begins with a letter or a bracket, the compact form with a small number."""


def nested(data: memoryview) -> Any:
    """The value in these bytes; ValueError, LookupError or struct.error where they are damaged."""
    if not data or data[0] >= _FIRST_LETTER:
        return json.loads(bytes(data))
    return _value(data, 0, 0)[0]


def _value(data: memoryview, at: int, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise ValueError(f"values are nested more than {_DEEPEST} deep")
    tag = data[at]
    if tag == 5:
        return _mapping(data, at + 1, depth)
    if tag in _LEAVES:
        return _LEAVES[tag](data, at + 1)
    raise ValueError(f"byte {at} has the tag {tag}, which is not known")


def _mapping(data: memoryview, at: int, depth: int) -> tuple[dict[str, Any], int]:
    count, at = _count(data, at)
    found = {}
    for _ in range(count):
        key, at = _text(data, at)
        found[key], at = _value(data, at, depth + 1)
    return found, at


def _records(data: memoryview, at: int) -> tuple[list[dict[str, Any]], int]:
    """Dicts of the same keys, which come once."""
    rows, at = _count(data, at)
    count, at = _count(data, at)
    keys = []
    for _ in range(count):
        key, at = _text(data, at)
        keys.append(key)
    found = []
    for _ in range(rows):
        row = {}
        for key in keys:
            row[key], at = _RECORD_LEAVES[data[at]](data, at + 1)
        found.append(row)
    return found, at


def _count(data: memoryview, at: int) -> tuple[int, int]:
    """A length, which cannot be more than what is left, whatever is counted."""
    (count,) = struct.unpack_from("<I", data, at)
    if count > len(data):
        raise ValueError(f"byte {at} counts {count} things in {len(data)} bytes")
    return count, at + 4


def _cut(data: memoryview, at: int, nbytes: int) -> tuple[memoryview, int]:
    if at + nbytes > len(data):
        raise ValueError(f"byte {at} begins {nbytes} bytes of the {len(data) - at} left")
    return data[at : at + nbytes], at + nbytes


def _text(data: memoryview, at: int) -> tuple[str, int]:
    count, at = _count(data, at)
    piece, at = _cut(data, at, count)
    return text_of(piece), at


def _json(data: memoryview, at: int) -> tuple[Any, int]:
    text, at = _text(data, at)
    return json.loads(text), at


def _texts(data: memoryview, at: int) -> tuple[list[str], int]:
    count, at = _count(data, at)
    found = []
    for _ in range(count):
        text, at = _text(data, at)
        found.append(text)
    return found, at


def _numbers(dtype: str) -> _Read:
    def read(data: memoryview, at: int) -> tuple[list[Any], int]:
        count, at = _count(data, at)
        piece, at = _cut(data, at, count * np.dtype(dtype).itemsize)
        return np.frombuffer(piece, dtype).tolist(), at

    return read


def _one(layout: str) -> _Read:
    def read(data: memoryview, at: int) -> tuple[Any, int]:
        return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)

    return read


def _none(_: memoryview, at: int) -> tuple[None, int]:
    return None, at


_LEAVES: dict[int, _Read] = {
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


_RECORD_LEAVES: dict[int, _Read] = {0x10: _none, 0x11: _text, 0x12: _one("<q"), 0x13: _one("<d"), 0x14: _one("<?")}


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
