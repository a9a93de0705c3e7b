"""Samples as bytes and back: tensors, arrays, numbers, texts and bytes in dicts, lists and tuples; never a pickle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from feedline.errors import SampleError
from feedline.rows import numpy_view, torch_dtype

_LENGTH_NBYTES = 8
_ALIGNMENT = 64

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def encode(sample: Any) -> bytes:
    """The bytes of a sample; SampleError names a type that has no form here."""
    buffers: list[bytes] = []
    head = json.dumps(_described(sample, buffers, "sample")).encode()
    head = head.ljust(-(-(len(head) + _LENGTH_NBYTES) // _ALIGNMENT) * _ALIGNMENT - _LENGTH_NBYTES)
    return b"".join([len(head).to_bytes(_LENGTH_NBYTES, "little"), head, *buffers])


def decode(data: bytes) -> Any:
    """The sample, equal in values, dtypes and containers; its memory is its own."""
    start = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
    return _restored(json.loads(data[_LENGTH_NBYTES:start]), memoryview(data)[start:])


def _described(value: Any, buffers: list[bytes], where: str) -> Any:
    """A JSON value for this one; what is bytes in memory goes to `buffers`, and is told by place and length."""
    kind = type(value)
    if kind in {bool, int, str} or value is None:
        return {"v": value}
    if kind is float:
        return {"f": value.hex()}
    if kind is dict and all(type(key) in {str, int} for key in value):
        return {"d": [[key, _described(each, buffers, f"{where}[{key!r}]")] for key, each in value.items()]}
    if kind in {list, tuple}:
        return {kind.__name__[0]: [_described(each, buffers, f"{where}[{i}]") for i, each in enumerate(value)]}
    if kind is bytes:
        return {"b": _placed(value, buffers)}
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().cpu().contiguous()
        return {"T": [str(value.dtype), list(value.shape), *_placed(numpy_view(plain).tobytes(), buffers)]}
    if isinstance(value, np.ndarray) and kind is np.ndarray and torch_dtype(value.dtype) is not None:
        return {"A": [value.dtype.str, list(value.shape), *_placed(value.tobytes(), buffers)]}
    if isinstance(value, np.generic) and torch_dtype(value.dtype) is not None:
        return {"S": [value.dtype.str, [], *_placed(value.tobytes(), buffers)]}
    raise SampleError(
        f"{where} is of type {kind.__name__}, which cannot be kept on disk; what can are tensors, arrays,"
        " numbers, str, bytes, None, and dicts (by str or int), lists and tuples of these"
    )


def _placed(data: bytes, buffers: list[bytes]) -> list[int]:
    start = sum(map(len, buffers))
    padding = -start % 16
    buffers.append(b"\0" * padding)
    buffers.append(data)
    return [start + padding, len(data)]


def _restored(told: Any, buffers: memoryview) -> Any:
    ((kind, value),) = told.items()
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_restored(each, buffers) for each in value)
    if kind == "d":
        return {key: _restored(each, buffers) for key, each in value}
    if kind == "v":
        return value
    if kind == "f":
        return float.fromhex(value)
    *form, start, length = value
    piece = bytearray(buffers[start : start + length])
    if kind == "b":
        return bytes(piece)
    dtype, shape = form
    if kind == "T":
        flat = torch.frombuffer(piece, dtype=_DTYPES[dtype]) if piece else torch.empty(0, dtype=_DTYPES[dtype])
        return flat.reshape(shape)
    array = np.frombuffer(piece, dtype).reshape(shape)
    return array if kind == "A" else array[()]


_CONTAINERS: dict[str, Any] = {"l": list, "t": tuple}
