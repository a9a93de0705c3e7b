"""States of samplers and generators as JSON: plain containers and numbers, arrays, tensors and bytes; never pickle."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
import torch

from feedline.errors import StateError

_KIND = "$"  # marks a dict that stands for something JSON does not have


def pack(value: Any, where: str = "state") -> Any:
    """`value` in JSON's types; `unpack` gives it back. Refuses anything that only pickle could carry."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return pack(value.item(), where)
    if isinstance(value, list):
        return [pack(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and _KIND not in value and all(type(key) is str for key in value):
        return {key: pack(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (tuple, dict)):
        items = list(value) if isinstance(value, tuple) else [list(item) for item in value.items()]
        return {_KIND: type(value).__name__, "items": pack(items, where)}
    if isinstance(value, (bytes, np.ndarray, torch.Tensor)):
        return _packed_buffer(value, where)
    raise StateError(f"{where} is a {type(value).__name__}, which a state of JSON cannot hold")


def unpack(value: Any) -> Any:
    """What `pack` was given; raises StateError where the value cannot come from `pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: unpack(item) for key, item in value.items()}
    try:
        return _UNPACK[value[_KIND]](value)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"a damaged state: {_KIND}={value[_KIND]!r} with {sorted(value)} means nothing") from error


def to_text(content: bytes) -> str:
    """Bytes as base64."""
    return base64.b64encode(content).decode()


def from_text(text: str) -> bytes:
    """Bytes from base64; raises StateError for anything else."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, binascii.Error) as error:
        raise StateError(f"a damaged state: {str(text)[:40]!r} is not base64") from error


def _packed_buffer(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {_KIND: "bytes", "data": to_text(value)}
    array = np.ascontiguousarray(value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value)
    if array.dtype.kind not in "biufc":
        raise StateError(f"{where} is an array of {array.dtype}, which a state of JSON cannot hold")
    kind = "tensor" if isinstance(value, torch.Tensor) else "ndarray"
    return {_KIND: kind, "dtype": array.dtype.str, "shape": list(value.shape), "data": to_text(array.tobytes())}


def _array(packed: dict[str, Any]) -> Any:
    return np.frombuffer(from_text(packed["data"]), packed["dtype"]).reshape(packed["shape"]).copy()


_UNPACK: dict[str, Any] = {
    "tuple": lambda packed: tuple(unpack(packed["items"])),
    "dict": lambda packed: dict(unpack(packed["items"])),
    "bytes": lambda packed: from_text(packed["data"]),
    "ndarray": _array,
    "tensor": lambda packed: torch.from_numpy(_array(packed)),
}
