"""User values in JSON: containers, numbers, arrays, tensors and bytes; never pickle."""

from __future__ import annotations

import base64
import binascii
import copy
import json
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from feedline.errors import StateError

_KIND = "$"  # key of a dict that encodes a type JSON does not have


_CONTAINERS = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict, "OrderedDict": OrderedDict}


def pack(value: Any, where: str = "state") -> Any:
    """`value` in JSON's types; StateError if only pickle could hold it.

    `unpack` is the inverse. Types are compared exactly: an instance of a subclass would return as another type.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) and (packed := _pack_scalar(value)) is not None:
        return packed
    if kind is list:
        return [pack(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is dict and _KIND not in value and all(type(key) is str for key in value):
        return {key: pack(item, f"{where}[{key!r}]") for key, item in value.items()}
    if _CONTAINERS.get(kind.__name__) is kind:
        items = [list(item) for item in value.items()] if isinstance(value, dict) else list(value)
        return {_KIND: kind.__name__, "items": pack(items, where)}
    if kind is bytes:
        return {_KIND: "bytes", "data": to_text(value)}
    if kind is np.ndarray and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        return {
            _KIND: "ndarray",
            "dtype": array.dtype.str,
            "shape": list(value.shape),
            "data": to_text(array.tobytes()),
        }
    if kind is torch.Tensor and _is_plain(value):
        return _pack_tensor(value)
    described = f"an array of {value.dtype}" if kind is np.ndarray else f"a {kind.__name__}"
    raise StateError(f"{where} is {described}, which JSON cannot represent")


def unpack(value: Any) -> Any:
    """The value that `pack` packed; StateError if the data is damaged."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, OpaqueState):
        return copy.deepcopy(value.value)
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: unpack(item) for key, item in value.items()}
    try:
        return _UNPACK[value[_KIND]](value)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise StateError(
            f"a damaged state: {_KIND}={value[_KIND]!r} with {sorted(value)}; load an earlier one"
        ) from error


def to_text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def from_text(text: str) -> bytes:
    """Bytes from base64; StateError for anything else."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, binascii.Error) as error:
        raise StateError(f"a damaged state: {str(text)[:40]!r} is not base64; load an earlier state") from error


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if its values and shape describe a tensor completely."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _pack_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    # As bytes, because NumPy lacks bfloat16 and other dtypes.
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {_KIND: "tensor", "dtype": dtype, "shape": list(tensor.shape), "data": to_text(content)}


def _pack_scalar(scalar: np.generic) -> dict[str, Any] | None:
    """A scalar of NumPy, by its dtype and memory.

    None if these do not give an equal scalar of the same type.
    """
    if scalar.dtype.hasobject or scalar.dtype.fields or not scalar.dtype.itemsize:
        return None
    packed = {_KIND: "scalar", "dtype": scalar.dtype.str, "data": to_text(scalar.tobytes())}
    back = _unpack_scalar(packed)
    return packed if type(back) is type(scalar) and back.tobytes() == scalar.tobytes() else None


def _unpack_scalar(packed: dict[str, Any]) -> Any:
    (scalar,) = np.frombuffer(from_text(packed["data"]), packed["dtype"])
    return scalar


def _unpack_array(packed: dict[str, Any]) -> Any:
    return np.frombuffer(from_text(packed["data"]), packed["dtype"]).reshape(packed["shape"]).copy()


def _unpack_tensor(packed: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, packed["dtype"])
    content = bytearray(from_text(packed["data"]))
    flat = (
        torch.frombuffer(content, dtype=torch.uint8).view(dtype)
        if content
        else torch.empty(0, dtype=dtype, device="cpu")
    )
    return flat.reshape(packed["shape"]).clone()


_UNPACK: dict[str, Any] = {
    **{
        name: lambda packed, kind=kind: kind(
            tuple(item) if issubclass(kind, dict) else item for item in unpack(packed["items"])
        )
        for name, kind in _CONTAINERS.items()
    },
    "bytes": lambda packed: from_text(packed["data"]),
    "scalar": _unpack_scalar,
    "ndarray": _unpack_array,
    "tensor": _unpack_tensor,
}


class OpaqueState:
    """A value that JSON cannot hold, kept unchanged.

    `torch.save` and `pickle` can store it if they can store the value. Code that walks nested dicts, such as
    `torch.distributed.checkpoint`, treats it as a leaf.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpaqueState) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"OpaqueState({self.value!r})"


def pack_or_keep(value: Any) -> Any:
    """`pack(value)`, or an `OpaqueState` of a copy of it."""
    try:
        return pack(value)
    except StateError:
        return OpaqueState(copy.deepcopy(value))


def to_leaf(packed: Any) -> Any:
    """Packed values as one JSON text; None stays None.

    A text is one entry of a checkpoint, with any content. Values that contain an `OpaqueState` become one.
    """
    if packed is None:
        return None
    try:
        return json.dumps(packed, separators=(",", ":"))
    except TypeError:
        return OpaqueState(packed)


def from_leaf(leaf: Any, field: str) -> Any:
    """The packed values of `to_leaf`; StateError names the damaged field."""
    if leaf is None:
        return None
    if isinstance(leaf, OpaqueState):
        return leaf.value
    try:
        return json.loads(leaf)
    except (TypeError, ValueError) as error:
        raise StateError(f"the field '{field}' of this state is damaged: {str(leaf)[:80]!r} is not JSON") from error
