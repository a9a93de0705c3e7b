"""Conversion of levels to numbers, found by trying the user's own steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from feedline.core.tensors import numpy_view
from feedline.images.pillow import ImageSource
from feedline.images.placed import PlacedReader, Resampling, Table
from feedline.transforms.recognized.frame import Frame
from feedline.transforms.recognized.layout import TensorLayout

LevelFunction = Callable[[Any], Any]


Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and std, per channel."""


PlacedImage = tuple[ImageSource, list[int], torch.Tensor]
"""Levels or an encoded image, their placement, and the row for them."""


class Numbers:
    """Steps such as ToTensor and Normalize, as one table.

    They map each level of a channel to one number. The steps themselves compute the table of all levels, so every bit
    is equal. `kind` is the class of the resulting tensor; `interleaved` is True if its memory is ordered (height,
    width, channels), and `interleaves_pixel` if that is so for an image of one pixel. Gray images have one channel.
    """

    def __init__(
        self, table: Table | None, channels: int, interleaved: bool, interleaves_pixel: bool, kind: type, scale: Scale
    ) -> None:
        self.dtype = torch.uint8 if table is None else torch.float32
        self.channels, self.interleaved, self.kind = channels, interleaved, kind
        self._renews_pixel = interleaved and not interleaves_pixel
        self._table, self._scale = table, scale
        self._readers: dict[tuple[bool, Resampling], PlacedReader] = {}
        self._deferred: dict[Resampling, Callable[[list[PlacedImage]], list[int]]] = {}

    def reader(self, planar: bool, resampling: Resampling) -> PlacedReader:
        reader = self._readers.get((planar, resampling))
        if reader is None:
            mean, std = self._scale
            reader = PlacedReader(self._table, planar=planar, resampling=resampling, mean=mean, std=std)
            self._readers[planar, resampling] = reader
        return reader

    def shape(self, frame: Frame) -> tuple[int, int, int]:
        return self.channels, frame.height, frame.width

    def new_tensor(self, frame: Frame, copied: bool) -> torch.Tensor:
        """New tensor of a frame, with the steps' class and strides.

        If the frame has a layout, the tensor has that layout, or with `copied` the layout of a copy.
        """
        if self._renews_pixel and frame.height == frame.width == 1:  # torch broadcasts nothing, and forgets the strides
            tensor = empty_row(self.shape(frame), self.dtype, interleaved=False)
        elif frame.layout is None:
            tensor = empty_row(self.shape(frame), self.dtype, self.interleaved)
        else:
            tensor = frame.layout.empty(self.dtype, copied)
        self.write(frame, tensor)
        return tensor if self.kind is torch.Tensor else tensor.as_subclass(self.kind)

    def layout(self, frame: Frame) -> TensorLayout:
        """Layout of the tensor that `new_tensor` gives for a frame without one."""
        return TensorLayout(*self.shape(frame), self.interleaved)

    def write(self, frame: Frame, row: torch.Tensor) -> None:
        """Write a frame into a row of any strides."""
        planar = row.is_contiguous()
        if self.channels == 1 or not (planar or row.permute(1, 2, 0).is_contiguous()):
            planes = torch.empty((1, 3, *row.shape[1:]), dtype=self.dtype, device="cpu")
            frame.write(self.reader(True, frame.resampling), numpy_view(planes))
            row.copy_(planes[0, : self.channels])
            return
        memory = numpy_view(row if planar else row.permute(1, 2, 0))
        frame.write(self.reader(planar, frame.resampling), memory[None])

    def deferred(self, resampling: Resampling) -> Callable[[list[PlacedImage]], list[int]]:
        """Function that writes many rows in one call.

        The function returns the positions of the images that the kernels refused. Equal arguments give the same object.
        """
        write = self._deferred.get(resampling)
        if write is None:
            write = self._deferred[resampling] = partial(self._write_all, resampling)
        return write

    def _write_all(self, resampling: Resampling, items: list[PlacedImage]) -> list[int]:
        sources, placements, rows = zip(*items, strict=True)
        first, last = rows[0], rows[-1]
        reader, lines = self.reader(True, resampling), np.array(placements, np.int64)
        # Rows of a batch are contiguous, and come in order.
        are_neighbors = last.data_ptr() - first.data_ptr() == first.nbytes * (len(rows) - 1)
        if are_neighbors and self.channels == 3:
            batch = first.as_strided((len(rows), *first.shape), (first.numel(), *first.stride()))
            return _refused(reader.read(sources, numpy_view(batch), lines), sources)
        planes = torch.empty((len(rows), 3, *first.shape[1:]), dtype=self.dtype, device="cpu")
        refused = _refused(reader.read(sources, numpy_view(planes), lines), sources)
        for row, plane in zip(rows, planes, strict=True):
            row.copy_(plane[: self.channels])
        return refused


def _refused(unwritten: Sequence[tuple[Any, ...]] | None, sources: Sequence[ImageSource]) -> list[int]:
    """Positions of encoded images that the kernels refused."""
    refused = [line[0] for line in unwritten or ()]
    if any(isinstance(sources[at], np.ndarray) for at in refused):
        raise RuntimeError(f"the image kernels refused levels in memory: {unwritten}; this is a bug in feedline")
    return refused


def empty_row(shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool) -> torch.Tensor:
    """Uninitialized image, (channels, height, width)."""
    if not interleaved:
        return torch.empty(shape, dtype=dtype, device="cpu")
    channels, height, width = shape
    return torch.empty((height, width, channels), dtype=dtype, device="cpu").permute(2, 0, 1)


def numbers_of(steps: Sequence[LevelFunction], mode: str) -> Numbers | None:
    """Conversion that equals the steps for images in `mode`, or None.

    `mode` is "RGB" or "L". The steps run on two images with all levels. The result is None if they fail, or if a number
    depends on more than level and channel.
    """
    channels = len(mode)
    try:
        given, other = (_apply(steps, _specimen(mode, turn)) for turn in (0, 1))
        pixel = _apply(steps, Image.new(mode, (1, 1)))
    except Exception:  # noqa: BLE001 - the steps raise it again, for each sample
        return None
    if not (_is_known(given, channels) and _is_known(other, channels)):
        return None
    plain = given.as_subclass(torch.Tensor)
    table = plain[:, 0].contiguous()
    # Each number must depend on its level and channel only, in any place and order.
    if not all(torch.equal(plain[:, line], table) for line in range(_LINES)):
        return None
    if not torch.equal(other.as_subclass(torch.Tensor)[:, 0], table.flip(1)):
        return None
    interleaved = given.stride(0) == 1, pixel.stride(2) == channels
    if given.dtype == torch.uint8:
        levels = torch.arange(256, dtype=torch.uint8, device="cpu").expand(channels, 256)
        return Numbers(None, channels, *interleaved, type(given), _NO_SCALE) if torch.equal(table, levels) else None
    of_each = table.expand(3, 256).contiguous().numpy()
    return Numbers(of_each, channels, *interleaved, type(given), _scale_of(steps))


_LINES = 2


_NO_SCALE = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@lru_cache(maxsize=4)
def _levels(channels: int, turn: int) -> bytes:
    line = np.arange(256, dtype=np.uint8)[:: -1 if turn else 1]
    return np.broadcast_to(line[None, :, None], (_LINES, 256, channels)).tobytes()


def _specimen(mode: str, turn: int) -> Image.Image:
    """Image with all levels in each channel; descending if `turn` is 1."""
    return Image.frombytes(mode, (256, _LINES), _levels(len(mode), turn))


def _apply(steps: Sequence[LevelFunction], value: Any) -> Any:
    for step in steps:
        value = step(value)
    return value


def _is_known(tensor: Any, channels: int) -> bool:
    """True for a tensor that the kernels can write."""
    if not isinstance(tensor, torch.Tensor) or tensor.shape != (channels, _LINES, 256) or tensor.requires_grad:
        return False
    if tensor.dtype not in (torch.uint8, torch.float32) or tensor.device.type != "cpu":
        return False
    return tensor.is_contiguous() or tensor.permute(1, 2, 0).is_contiguous()


def _scale_of(steps: Sequence[Any]) -> Scale:
    """Mean and std by which the kernels may compute the table.

    The kernels check that the bits are equal.
    """
    for step in steps:
        mean, std = (_triple(getattr(step, name, None)) for name in ("mean", "std"))
        if mean and std:
            return mean, std
    return _NO_SCALE


def _triple(values: Any) -> tuple[float, ...] | None:
    is_known = isinstance(values, (list, tuple)) and len(values) == 3 and all(type(each) is float for each in values)
    return tuple(values) if is_known else None
