"""Decoders of batches of images on a device, whichever is installed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from feedline import images

Files = Sequence[torch.Tensor]
"""Encoded images: uint8, one-dimensional, in host memory."""


Decoder = Callable[[Files, torch.device], list[torch.Tensor | None]]
"""`decoder(files, device)` returns RGB levels (3, height, width) there; None for files that it cannot decode."""


class DecodeCounts(NamedTuple):
    """Images decoded for devices by this process, and fallbacks among them."""

    decoded: int = 0
    fallbacks: int = 0


class _Counter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = DecodeCounts()

    def add(self, decoded: int, fallbacks: int) -> None:
        with self._lock:
            self.counts = DecodeCounts(self.counts.decoded + decoded, self.counts.fallbacks + fallbacks)


_counter = _Counter()


def counts() -> DecodeCounts:
    """Counts of this process so far."""
    return _counter.counts


def decode_there(files: Files, device: torch.device) -> list[torch.Tensor]:
    """RGB levels (3, height, width) of each file, on the device.

    A file that the device's decoder refuses is decoded on the CPU, and counted. ImageError carries the row of the first
    one that cannot be read at all.
    """
    decoded = decoder_of(device.type)(files, device)
    missing = [row for row, levels in enumerate(decoded) if levels is None]
    for row, levels in zip(missing, _decode_natively([files[row] for row in missing]), strict=True):
        if isinstance(levels, images.ImageError):
            levels.row = row
            raise levels
        decoded[row] = levels.to(device)
    _counter.add(len(files), len(missing))
    return [levels for levels in decoded if levels is not None]


@cache
def decoder_of(kind: str) -> Decoder:
    """The first installed decoder for a type of device.

    Without one, a warning is given, and every file falls back to the CPU.
    """
    for module, make in _DECODERS if kind == "cuda" else ():
        if _is_installed(module):
            return make()
    warnings.warn(
        f"no decoder of images for {kind!r} is installed: DecodeOnDevice decodes on the CPU, in the training process."
        " Install nvidia-nvimgcodec or torchvision, or leave out DecodeOnDevice, so that workers decode",
        RuntimeWarning,
        stacklevel=3,
    )
    return lambda files, _: [None] * len(files)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None  # imports its package, of which another distribution may be a part
    except (ImportError, RuntimeError):  # missing, or built for another torch
        return False


def _decode_natively(files: Files) -> list[torch.Tensor | images.ImageError]:
    """The levels of each file, or its error."""
    if len(files) < 2:
        return [_decode_native(file) for file in files]
    with ThreadPoolExecutor(min(len(files), torch.get_num_threads()), "feedline-decode") as threads:
        return list(threads.map(_decode_native, files))


def _decode_native(file: torch.Tensor) -> torch.Tensor | images.ImageError:
    try:
        levels = images.decode(file.numpy())
        writable = levels if levels.flags.writeable else levels.copy()  # Pillow's are read-only
        return torch.from_numpy(writable).permute(2, 0, 1)
    except images.ImageError as error:
        return error


def _nvimgcodec() -> Decoder:
    codec: Any = import_module("nvidia.nvimgcodec").Decoder()

    def decode(files: Files, device: torch.device) -> list[torch.Tensor | None]:
        with torch.cuda.device(device):
            found = codec.decode([file.numpy() for file in files])
            levels = [None if each is None else torch.as_tensor(each).permute(2, 0, 1) for each in found]
            torch.cuda.current_stream(device).synchronize()  # the files may change after this
        return [None if each is None or each.shape[0] != 3 else each for each in levels]

    return decode


def _torchvision() -> Decoder:
    io: Any = import_module("torchvision.io")

    def decode(files: Files, device: torch.device) -> list[torch.Tensor | None]:
        jpegs = [row for row, file in enumerate(files) if file[:3].tolist() == [0xFF, 0xD8, 0xFF]]
        levels: list[torch.Tensor | None] = [None] * len(files)
        for row, each in zip(jpegs, _all_or_each(io, [files[row] for row in jpegs], device), strict=True):
            levels[row] = each
        torch.cuda.current_stream(device).synchronize()  # the files may change after this
        return levels

    return decode


def _all_or_each(io: Any, files: Files, device: torch.device) -> list[torch.Tensor | None]:
    """One call for all files; after an error, one for each."""
    rgb = io.ImageReadMode.RGB
    try:
        return list(io.decode_jpeg(list(files), mode=rgb, device=device)) if files else []
    except RuntimeError:
        levels: list[torch.Tensor | None] = []
        for file in files:
            try:
                levels.append(io.decode_jpeg(file, mode=rgb, device=device))
            except RuntimeError:
                levels.append(None)
        return levels


_DECODERS: tuple[tuple[str, Callable[[], Decoder]], ...] = (
    ("nvidia.nvimgcodec", _nvimgcodec),
    ("torchvision.io", _torchvision),
)
