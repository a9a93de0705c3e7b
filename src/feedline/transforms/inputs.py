"""Conversion of the accepted kinds of images to arrays."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from feedline import images
from feedline.errors import ArgumentError

ImageLevels = NDArray[np.uint8]
"""Levels of an image: shape (height, width, channels), with 3 channels (RGB) or 1 (gray)."""


_ENCODED = (bytes, bytearray, memoryview, mmap.mmap)


_KINDS = "a PIL image, a uint8 array (H, W, 3), a uint8 tensor (3, H, W), a path, or the bytes of an image file"


def as_source(value: Any) -> images.ImageSource:
    """Return paths and encoded bytes unchanged, other images as `ImageLevels`."""
    if isinstance(value, (str, *_ENCODED)):
        return value
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    return value if _is_file(value) else pixels(value)


def pixels(value: Any) -> ImageLevels:
    """Return the levels of an image, decoded if necessary.

    The result may be memory of the caller: never write to it.
    """
    if isinstance(value, np.ndarray):
        return images.decode(value) if _is_file(value) else _from_array(value)
    if isinstance(value, Image.Image):
        return _with_channels(np.asarray(value.convert("L" if value.mode in ("1", "L") else "RGB")))
    if isinstance(value, torch.Tensor):
        return _from_tensor(value)
    if isinstance(value, (str, os.PathLike, *_ENCODED)):
        return images.decode(as_source(value))
    raise ArgumentError(f"not an image: {_describe(value)}; give {_KINDS}")


def open_image(value: Any) -> Any:
    """Return float tensors unchanged, other images as `pixels` does."""
    return value if isinstance(value, torch.Tensor) and value.is_floating_point() else pixels(value)


def in_own_memory(result: Any, source: Any) -> Any:
    """Return the result with memory of its own.

    Copies an array that may share memory with `source`, is read-only or has gaps, and a tensor that shares memory with
    floating-point numbers. Levels given as a tensor reach only callables of other libraries, which may return them.
    """
    if isinstance(result, torch.Tensor) and isinstance(source, torch.Tensor) and source.is_floating_point():
        return result.clone() if _share_memory(result, source) else result
    if not isinstance(result, np.ndarray):
        return result
    memory = source.numpy() if isinstance(source, torch.Tensor) else source
    is_shared = isinstance(memory, np.ndarray) and np.may_share_memory(result, memory)
    return result.copy() if is_shared or not (result.flags.writeable and result.flags.c_contiguous) else result


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.strided is not one.layout or one.layout is not other.layout:
        return one is other
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _is_file(value: Any) -> bool:
    """True for encoded bytes in an array, as from a memory-mapped shard."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == np.uint8


def _with_channels(array: NDArray[Any]) -> NDArray[Any]:
    return array[:, :, None] if array.ndim == 2 else array


def _from_array(array: NDArray[Any]) -> ImageLevels:
    if array.dtype != np.uint8:
        raise ArgumentError(
            f"not an image: {_describe(array)}; levels are uint8, 0 to 255:"
            " put ToTensor and Normalize last, or convert with (array * 255).astype(np.uint8)"
        )
    array = _with_channels(array)
    if array.ndim != 3 or array.shape[2] not in (1, 3) or 0 in array.shape:
        raise ArgumentError(f"not an image: {_describe(array)}; {_shape_remedy(array.shape)}")
    return array


def _shape_remedy(shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and shape[0] in (1, 3):
        return "arrays are (height, width, channels): pass array.transpose(1, 2, 0)"
    if len(shape) == 3 and shape[2] == 4:
        return "there is a fourth channel: pass array[:, :, :3]"
    if len(shape) == 4:
        return "this looks like a batch: pass its images one by one"
    return "arrays are (height, width, 3), or (height, width) if they are gray"


def _from_tensor(tensor: torch.Tensor) -> ImageLevels:
    if tensor.dtype != torch.uint8 or tensor.device.type != "cpu":
        raise ArgumentError(
            f"not an image: {_describe(tensor)}; levels are uint8 tensors on the CPU: put ToTensor and Normalize last"
        )
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3) or 0 in tensor.shape:
        remedy = ": pass tensor.permute(2, 0, 1), or an array" if tensor.shape[-1:] in ((1,), (3,)) else ""
        raise ArgumentError(f"not an image: {_describe(tensor)}; tensors are (channels, height, width){remedy}")
    return tensor.permute(1, 2, 0).numpy()


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} on {value.device} with shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
