"""Values in shards of Mosaic Streaming, by encodings of columns.

They are decoded as by Mosaic's own reader. Pickle is never read.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from math import prod
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from feedline.datasets.decoding import DecodeFunction, text_of
from feedline.errors import ArgumentError

_SCALARS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)


_DTYPES = dict(
    zip(
        (8, 9, 16, 17, 18, 32, 33, 34, 64, 65, 66),
        ["uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64", "int64", "float64"],
        strict=True,
    )
)
"""Dtypes of arrays whose column names no dtype, by the first byte of the array."""


_SHAPE_DTYPES = ("u1", "<u2", "<u4", "<u8")


_MAX_PIXELS = 1 << 28


def decode_function(encoding: str, form: str = "mds") -> DecodeFunction:
    """Function for a column's values in shards of a format.

    ArgumentError for pickle and unknown encodings.
    """
    if form != "mds":
        return _text_function(encoding, form)
    if encoding.startswith("ndarray"):
        return _ndarray(encoding)
    if encoding in _SCALARS:
        return partial(_scalar, np.dtype(encoding).newbyteorder("<"))
    if encoding == "pkl":
        raise ArgumentError("pickle, which can run arbitrary code and is never read")
    try:
        return _DECODERS[encoding]
    except KeyError:
        raise ArgumentError(f"{encoding!r}, which is not known") from None


def _text_function(encoding: str, form: str) -> DecodeFunction:
    if encoding not in _TEXT_DECODERS:
        raise ArgumentError(f"{encoding!r}, which is not known")
    return _parsed if form == "json" else _TEXT_DECODERS[encoding]


def is_image(encoding: str) -> bool:
    """True if values are encoded image files."""
    return encoding in ("jpeg", "png")


def fixed_nbytes(encoding: str) -> int | None:
    """Size of each value in bytes; None if values have individual sizes."""
    if encoding == "int":
        return 8
    if encoding in _SCALARS:
        return np.dtype(encoding).itemsize
    if encoding.count(":") < 2:
        return None
    dtype, shape = _parse_ndarray(encoding)
    return None if dtype is None or shape is None else dtype.itemsize * prod(shape)


def _scalar(dtype: np.dtype[Any], data: memoryview) -> Any:
    return np.frombuffer(data, dtype, 1)[0]


def _ndarray(encoding: str) -> DecodeFunction:
    try:
        return partial(_array, *_parse_ndarray(encoding))
    except (ValueError, TypeError, SyntaxError):
        raise ArgumentError(f"{encoding!r}, which is not known") from None


def _parse_ndarray(encoding: str) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None]:
    """Dtype and shape of a column's arrays; None where not fixed."""
    name, _, sides = encoding.partition(":")[2].partition(":")
    dtype = np.dtype(name).newbyteorder("<") if name else None
    shape = tuple(map(int, sides.split(","))) if sides else None
    if (dtype is not None and dtype.kind not in "biufc") or min(shape or (), default=0) < 0:
        raise ValueError(f"there are no arrays of {encoding!r}")
    return dtype, shape


def _array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: memoryview) -> NDArray[Any]:
    """Decode an array into its own memory.

    Dtype and shape are at the front of the data if the column does not fix them.
    """
    if dtype is None:
        dtype, data = np.dtype(_DTYPES[data[0]]).newbyteorder("<"), data[1:]
    if shape is None:
        sides = np.frombuffer(data, _SHAPE_DTYPES[data[0] & 3], data[0] >> 2, 1)
        shape, data = tuple(sides.tolist()), data[1 + sides.nbytes :]
    array: NDArray[Any] = np.frombuffer(data, dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="))


def image(data: memoryview) -> PIL.Image.Image:
    image = PIL.Image.open(io.BytesIO(data))
    image.load()
    return image


def bare_image(data: memoryview) -> PIL.Image.Image:
    width, height, letters = struct.unpack_from("<III", data)
    if width * height > _MAX_PIXELS:
        raise ValueError(f"an image of {width} x {height} pixels")
    mode, pixels = str(data[12 : 12 + letters], "ascii"), data[12 + letters :]
    return PIL.Image.frombytes(mode, (width, height), bytes(pixels))


def images(data: memoryview) -> list[PIL.Image.Image]:
    """Decode a list of images: their number, their sizes, then the files."""
    return _decode_several(image, data)


def _list(each: DecodeFunction, data: memoryview) -> list[Any]:
    """Decode a list, stored like `images` after four reserved bytes."""
    return _decode_several(each, data[4:])


def _decode_several(each: DecodeFunction, data: memoryview) -> list[Any]:
    (count,) = struct.unpack_from("<I", data)
    sizes = np.frombuffer(data, "<u4", count, 4)
    stops = 4 + 4 * count + np.cumsum(sizes, dtype=np.int64)
    if count and stops[-1] > len(data):
        raise ValueError(f"{count} values of {stops[-1]} bytes in {len(data)}")
    return [each(data[stop - size : stop]) for size, stop in zip(sizes.tolist(), stops.tolist(), strict=True)]


def _integer(data: memoryview) -> int:
    return int(struct.unpack("<q", data)[0])


def _parsed(value: Any) -> Any:
    """A value of a JSON object, which already has its type."""
    return value


def _parse_text(kind: Callable[[str], Any], data: memoryview) -> Any:
    return kind(text_of(data))


_DECODERS: dict[str, DecodeFunction] = {
    "bytes": bytes,
    "str": text_of,
    "int": _integer,
    "str_int": partial(_parse_text, int),
    "str_float": partial(_parse_text, float),
    "str_decimal": partial(_parse_text, Decimal),
    "json": partial(_parse_text, json.loads),
    "pil": bare_image,
    "jpeg": image,
    "png": image,
    "jpeg_array": images,
    "jpegarray": images,
    "list[pil]": partial(_list, bare_image),
    "list[jpeg]": partial(_list, image),
    "list[png]": partial(_list, image),
}


_TEXT_DECODERS: dict[str, DecodeFunction] = {
    "str": text_of,
    "int": partial(_parse_text, int),
    "float": partial(_parse_text, float),
}
"""Decoders of columns in shards of text."""
