"""Memory of the tensors that frames stand for."""

from __future__ import annotations

import torch

from feedline.images.crops import Box

Sides = tuple[int, int, int]
"""Numbers of channels, height and width; or the strides between them."""


class TensorLayout:
    """Shape, strides and storage of an image tensor of levels.

    They follow the steps of torchvision, so that the pixels can be written into the same memory in the end.
    """

    __slots__ = ("_offset", "_shape", "_stored", "_strides")

    def __init__(self, channels: int, height: int, width: int, interleaved: bool) -> None:
        self._become((channels, height, width), interleaved)

    def _become(self, shape: Sides, interleaved: bool) -> None:
        channels, height, width = self._shape = shape
        self._strides = (1, channels * width, channels) if interleaved else (height * width, width, 1)
        self._offset, self._stored = 0, channels * height * width

    def crop(self, box: Box) -> None:
        """Crop to a part, which must lie within the image."""
        left, top, width, height = box
        self._offset += top * self._strides[1] + left * self._strides[2]
        self._shape = (self._shape[0], height, width)

    def copy(self) -> None:
        """Become the layout of a copy, as a flip or conversion makes."""
        shape = self._shape
        if self._stored != shape[0] * shape[1] * shape[2] or 1 in shape:
            # torch decides in which order the copy of a part lies.
            part = torch.empty_strided(shape, self._strides, dtype=torch.uint8, device="cpu")
            channels, rows, columns = torch.empty_like(part).stride()
            self._strides = channels, rows, columns
        self._offset, self._stored = 0, shape[0] * shape[1] * shape[2]

    def resize(self, height: int, width: int) -> None:
        self._become((self._shape[0], height, width), self._stays_interleaved())

    def _stays_interleaved(self) -> bool:
        """True if a resize gives memory ordered (height, width, channels)."""
        channels, _, width = self._shape
        if 1 not in self._shape:
            return self._strides == (1, channels * width, channels)
        batch = torch.empty_strided(self._shape, self._strides, dtype=torch.uint8, device="cpu").reshape(
            -1, *self._shape
        )
        sizes, strides = batch.shape, batch.stride()
        if batch.is_contiguous(memory_format=torch.channels_last):
            strides = (batch.numel(), *strides[1:])  # so does torchvision, since torch would not see the order
        # As is_channels_last_strides_2d of torch's c10/core/MemoryFormat.h.
        least = 0
        for dimension in (1, 3, 2, 0):
            if strides[dimension] < least or (dimension == 0 and least == strides[1]):
                return False
            least = strides[dimension] * sizes[dimension]
        return True

    def empty(self, dtype: torch.dtype, copied: bool) -> torch.Tensor:
        """New tensor with this layout, or with `copied` that of a copy."""
        if copied:
            self.copy()
        if self._stored == self._shape[0] * self._shape[1] * self._shape[2]:
            return torch.empty_strided(self._shape, self._strides, dtype=dtype, device="cpu")
        return torch.empty(self._stored, dtype=dtype, device="cpu").as_strided(self._shape, self._strides, self._offset)
