"""Images with crops, resizes and flips collected into one call."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from feedline import images
from feedline.images.crops import Box
from feedline.images.placed import BILINEAR, PlacedReader, Resampling, level_reader
from feedline.transforms.recognized.layout import TensorLayout

_LONGEST_SIDE = 1 << 16
"""Pixels along one side of a resized image; larger ones are left to Pillow."""


_ORDERS_PASSES = int(PIL.__version__.partition(".")[0]) >= 13
"""True from Pillow 13 on, which shrinks tall images vertically first, as the kernels do."""


class RefusedError(Exception):
    """The kernels cannot read a source, or not with Pillow's pixels."""


class Frame:
    """Image whose crops, resizes and flips are collected.

    The pixels of `box` are resized to `full`, of which `window` shows a part, mirrored. Coordinates of `crop` are those
    of the image as it appears, after all steps so far. A step that does not fit into one call is executed at once, and
    the next steps continue from its levels. All pixels equal those of Pillow's `crop`, `resize` and `transpose` in the
    same order, or those of torchvision's on tensors if the frame stands for the tensor that `tensor_of(frame)` makes.
    `layout` is given if the memory of that tensor matters; then all crops are within the image. A gray frame has three
    equal channels, and stands for an image in mode L. `undo` is given if the sample can be read again, and restores the
    random generators to before its draws.
    """

    __slots__ = (
        *("box", "flip", "full", "gray", "layout", "limit", "opened", "resampling", "source", "tensor_of", "undo"),
        *("upended", "window"),
    )

    def __init__(self, source: images.ImageSource, width: int, height: int, limit: int = 0) -> None:
        self.limit, self.gray = limit, False
        self.opened: Callable[[], Image.Image] | None = None
        self.undo: Callable[[], object] | None = None
        self.tensor_of: Callable[[Frame], Any] | None = None
        self.layout: TensorLayout | None = None
        self._begin(source, width, height)

    def _begin(self, source: images.ImageSource, width: int, height: int) -> None:
        self.source = source
        self.box: Box = (0, 0, width, height)
        self.full = (height, width)
        self.window: Box = (0, 0, width, height)
        self.flip = self.upended = False
        self.resampling = BILINEAR

    @property
    def width(self) -> int:
        return self.window[2]

    @property
    def height(self) -> int:
        return self.window[3]

    @property
    def is_plain(self) -> bool:
        """True if nothing was done to an array of levels."""
        height, width = self.full
        moved = self.flip or self.upended or self.window != (0, 0, width, height) or self.box != self.window
        return isinstance(self.source, np.ndarray) and not moved

    def flip_horizontally(self) -> None:
        self.flip = not self.flip
        if self.layout is not None:
            self.layout.copy()

    def flip_vertically(self) -> None:
        self.upended = not self.upended
        if self.layout is not None:
            self.layout.copy()

    def crop(self, left: int, top: int, width: int, height: int) -> None:
        """Crop to a part of the image; black beyond the edges.

        Raises RefusedError if the part shows nothing of the image.
        """
        if self.layout is not None:
            self.layout.crop((left, top, width, height))
        if not self._has_pixels_for(left, top, width, height):
            self.materialize()
        x, y, before_width, before_height = self.window
        if self.flip:
            left = before_width - left - width
        if self.upended:
            top = before_height - top - height
        self.window = (x + left, y + top, width, height)
        if not self._shows_something():
            raise RefusedError("a crop shows nothing of the image")

    def _has_pixels_for(self, left: int, top: int, width: int, height: int) -> bool:
        """True if a crop needs no pixels that earlier crops removed."""
        x, y, shown_width, shown_height = self.window
        full_height, full_width = self.full
        within = left >= 0 and top >= 0 and left + width <= shown_width and top + height <= shown_height
        whole = x <= 0 and y <= 0 and x + shown_width >= full_width and y + shown_height >= full_height
        return within or whole

    def _shows_something(self) -> bool:
        x, y, width, height = self.window
        across = min(self.full[1], x + width) - max(0, x)
        down = min(self.full[0], y + height) - max(0, y)
        return width > 0 and height > 0 and across > 0 and down > 0

    def resize(self, height: int, width: int, bicubic: bool) -> None:
        """Resize as Pillow or torch does, antialiased.

        Raises RefusedError if the kernels cannot give the same pixels.
        """
        if (height, width) == (self.height, self.width):
            return
        if not (0 < height <= _LONGEST_SIDE and 0 < width <= _LONGEST_SIDE):
            raise RefusedError("the size is for Pillow to judge")
        if not self._is_box():
            self.materialize()
        x, y, w, h = self.window
        shrinks = h - height
        is_tensor = self.tensor_of is not None
        if not (_ORDERS_PASSES or is_tensor) and shrinks > 0 and shrinks > 2 * (w - width):
            raise RefusedError("this Pillow rounds such a resize in another order")
        self.box = (self.box[0] + x, self.box[1] + y, w, h)
        self.full, self.window = (height, width), (0, 0, width, height)
        self.resampling = Resampling(bicubic, is_tensor)
        if self.layout is not None:
            self.layout.resize(height, width)

    def _is_box(self) -> bool:
        """True if the image is an unchanged part of its source."""
        x, y, width, height = self.window
        resized = self.full != (self.box[3], self.box[2])
        padded = x < 0 or y < 0 or x + width > self.full[1] or y + height > self.full[0]
        return not (resized or padded or self.flip or self.upended)

    def placement(self) -> list[int]:
        """Integers for `PlacedReader.read`."""
        return [*self.box, self.flip, self.upended, *self.full, self.window[0], self.window[1]]

    def write(self, reader: PlacedReader, out: NDArray[Any]) -> None:
        """Write the image into `out`, of shape (1, ...).

        Raises RefusedError if the kernels cannot read the source.
        """
        unwritten = reader.read((self.source,), out, np.array([self.placement()], np.int64), self.limit)
        if unwritten:
            raise RefusedError(unwritten[0][3])

    def materialize(self) -> NDArray[np.uint8]:
        """Execute all steps so far, and continue from the result.

        Returns the levels, (height, width, 3).
        """
        if not self.is_plain:
            out = np.empty((1, self.height, self.width, 3), np.uint8)
            self.write(level_reader(self.resampling), out)
            self._begin(out[0], self.width, self.height)
        assert isinstance(self.source, np.ndarray)
        return self.source

    def to_pillow(self, *, with_info: bool) -> Image.Image:
        """Pillow image of the levels so far.

        `with_info` adds the `info` that Pillow reads from the file.
        """
        levels = self.materialize()
        image = Image.fromarray(np.ascontiguousarray(levels[:, :, 0] if self.gray else levels))
        if with_info and self.opened is not None:
            image.info = self.opened().info
        return image

    def to_value(self, *, with_info: bool = False) -> Any:
        """Image or tensor that the frame stands for."""
        return self.to_pillow(with_info=with_info) if self.tensor_of is None else self.tensor_of(self)


def frame_of(levels: NDArray[np.uint8]) -> Frame:
    """Frame over levels: (height, width, 3), or (height, width) for gray."""
    height, width = levels.shape[:2]
    if levels.ndim == 3:
        return Frame(levels, width, height)
    frame = Frame(np.broadcast_to(levels[:, :, None], (height, width, 3)), width, height)
    frame.gray = True
    return frame


def open_encoded(encoded: bytes) -> Callable[[], Image.Image]:
    """Function that opens an image file in memory, without decoding it."""
    return lambda: Image.open(io.BytesIO(encoded))
