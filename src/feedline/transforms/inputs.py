"""What counts as a picture, and how each kind becomes an array."""

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

Picture = NDArray[np.uint8]
"""Levels of shape (height, width, channels), with 3 channels (RGB) or 1 (gray)."""


_ENCODED = (bytes, bytearray, memoryview, mmap.mmap)


_KINDS = "a PIL image, a uint8 array (H, W, 3), a uint8 tensor (3, H, W), a path, or the bytes of an image file"


def loaded(value: Any) -> images.Source:
    """What `feedline.images` reads: a path or encoded bytes as they are, anything else as a `Picture`."""
    if isinstance(value, (str, *_ENCODED)):
        return value
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    return value if _is_file(value) else pixels(value)


def pixels(value: Any) -> Picture:
    """The levels of any kind of picture; decoded if need be. Not to be written to: it may be the caller's memory."""
    if isinstance(value, np.ndarray):
        return images.decode(value) if _is_file(value) else _of_array(value)
    if isinstance(value, Image.Image):
        return _with_channels(np.asarray(value.convert("L" if value.mode in ("1", "L") else "RGB")))
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, (str, os.PathLike, *_ENCODED)):
        return images.decode(loaded(value))
    raise ArgumentError(f"not an image: {_told(value)}; give {_KINDS}")


def opened(value: Any) -> Any:
    """As `pixels`, but tensors of numbers are left as they are, for the steps that may come after Normalize."""
    return value if isinstance(value, torch.Tensor) and value.is_floating_point() else pixels(value)


def owned(result: Any, given: Any) -> Any:
    """The result of a pipeline; a copy where it is, or might be, memory of what it was made from."""
    if not isinstance(result, np.ndarray):
        return result
    memory = given.numpy() if isinstance(given, torch.Tensor) else given
    lent = isinstance(memory, np.ndarray) and np.may_share_memory(result, memory)
    return result if result.flags.writeable and not lent else result.copy()


def _is_file(value: Any) -> bool:
    """Whether an array holds the bytes of a file, such as a slice of a memory-mapped shard."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == np.uint8


def _with_channels(array: NDArray[Any]) -> NDArray[Any]:
    return array[:, :, None] if array.ndim == 2 else array


def _of_array(array: NDArray[Any]) -> Picture:
    if array.dtype != np.uint8:
        raise ArgumentError(
            f"not an image: {_told(array)}; levels are uint8, 0 to 255:"
            " put ToTensor and Normalize last, or convert with (array * 255).astype(np.uint8)"
        )
    array = _with_channels(array)
    if array.ndim != 3 or array.shape[2] not in (1, 3) or 0 in array.shape:
        raise ArgumentError(f"not an image: {_told(array)}; {_arrangement(array.shape)}")
    return array


def _arrangement(shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and shape[0] in (1, 3):
        return "arrays are (height, width, channels): pass array.transpose(1, 2, 0)"
    if len(shape) == 3 and shape[2] == 4:
        return "there is a fourth channel: pass array[:, :, :3]"
    if len(shape) == 4:
        return "this looks like a batch: pass its pictures one by one"
    return "arrays are (height, width, 3), or (height, width) where they are gray"


def _of_tensor(tensor: torch.Tensor) -> Picture:
    if tensor.dtype != torch.uint8 or tensor.device.type != "cpu":
        raise ArgumentError(
            f"not an image: {_told(tensor)}; levels are uint8 tensors on the CPU: put ToTensor and Normalize last"
        )
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3) or 0 in tensor.shape:
        turn = ": pass tensor.permute(2, 0, 1), or an array" if tensor.shape[-1:] in ((1,), (3,)) else ""
        raise ArgumentError(f"not an image: {_told(tensor)}; tensors are (channels, height, width){turn}")
    return tensor.permute(1, 2, 0).numpy()


def _told(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} on {value.device} with shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
