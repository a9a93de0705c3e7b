"""Images with deferred decoding, crop, turn and resize; Pillow's methods as changes.

A change takes the image and the arguments of the method. It returns None for unknown arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import Image

from feedline.core.stage_parts import DECODING
from feedline.images import native
from feedline.images.crops import Box, Pixels

Turn = tuple[bool, bool, bool]
"""Transposed, mirrored in x, mirrored in y.

Pixel (x, y) of the turned image is pixel (x, y) of the original, with x and y exchanged if the image is transposed,
then counted from the opposite edge of the original if it is mirrored.
"""


UPRIGHT: Turn = (False, False, False)
MIRRORED: Turn = (False, True, False)


def compose(first: Turn, second: Turn) -> Turn:
    """Compose two turns: `first` is applied before `second`."""
    x, y = second[1:] if not first[0] else (second[2], second[1])
    return first[0] != second[0], first[1] != x, first[2] != y


def turn_pixels(pixels: Pixels, turn: Turn) -> Pixels:
    """View of (height, width, channels) in another orientation."""
    if turn == UPRIGHT:
        return pixels
    view = pixels[:: -1 if turn[2] else 1, :: -1 if turn[1] else 1]
    return view.transpose(1, 0, 2) if turn[0] else view


def original_box(box: Box, turn: Turn, size: tuple[int, int]) -> Box:
    """Map a box of a turned image to its original.

    Boxes are (x, y, width, height); `size` is the original's.
    """
    x, y, width, height = (box[1], box[0], box[3], box[2]) if turn[0] else box
    return (
        size[0] - x - width if turn[1] else x,
        size[1] - y - height if turn[2] else y,
        width,
        height,
    )


class DeferredResize(NamedTuple):
    """Pillow's resize of a box, and the shown part of the result.

    The box (left, top, right, bottom), of the precision of float32, becomes `size` (width, height) pixels. The result
    is the turned part `window` of them. `filter` is Pillow's number. With `across_first` the horizontal pass always
    comes first.
    """

    filter: int
    box: tuple[float, float, float, float]
    size: tuple[int, int]
    window: Box
    turn: Turn = UPRIGHT
    across_first: bool = False

    def read(self, source: Any, size: tuple[int, int], scale: int, part: Box) -> Pixels | None:
        """Resize a part of a JPEG or of pixels; None on failure."""
        x, y, width, height = self.window
        flip = self.turn == MIRRORED
        arguments = (self.filter, self.box, self.size, (x, y), flip, self.across_first)
        content = native.native.image_part(source, size, scale, part, arguments, (height, width))
        if content is None:
            return None
        rows = np.ndarray((height, width, 3), np.uint8, content)
        return rows if flip else np.ascontiguousarray(turn_pixels(rows, self.turn))


class PixelSource:
    """Pixels of an image, or a JPEG decoded as far as needed.

    The first use decodes a part. At the second use all pixels are decoded and retained, for images that share the
    source. `size` is (width, height) at 1/scale. `fallback(jpeg)` decodes all pixels if the kernels fail.
    """

    def __init__(
        self, jpeg: bytes, full_size: tuple[int, int], scale: int, fallback: Callable[[bytes], Pixels]
    ) -> None:
        self._jpeg, self._full_size, self._scale, self._fallback = jpeg, full_size, scale, fallback
        self.size = -(-full_size[0] // scale), -(-full_size[1] // scale)
        self._pixels: Pixels | None = None
        self._is_used = False

    @classmethod
    def of(cls, pixels: Pixels) -> PixelSource:
        """Source of decoded pixels, (height, width, 3)."""
        height, width, _ = pixels.shape
        source = cls(b"", (width, height), 1, lambda _: pixels)
        source._pixels = pixels
        return source

    def take_jpeg(self) -> bytes | None:
        """The JPEG, for its first use at full size; None later."""
        if self._is_used or self._scale != 1 or not self._jpeg:
            return None
        self._is_used = True
        return self._jpeg

    def read(self, part: Box, turn: Turn, resize: DeferredResize | None) -> Pixels:
        """Contiguous pixels of a part, turned, then resized."""
        part_alone = (turn == UPRIGHT or resize is None) and part != (0, 0, *self.size)
        if self._pixels is None and not self._is_used and (part_alone or (resize is not None and turn == UPRIGHT)):
            self._is_used = True
            found = self._decode(self._jpeg, part, resize)
            if found is not None:
                return found if resize is not None else np.ascontiguousarray(turn_pixels(found, turn))
        pixels = turn_pixels(self._cut(part), turn)
        if resize is None:
            return np.ascontiguousarray(pixels)
        height, width, _ = pixels.shape
        result = resize.read(pixels, (width, height), 1, (0, 0, width, height))
        if result is None:  # for pixels in memory, the only cause is a lack of memory
            raise MemoryError
        return result

    def _cut(self, part: Box) -> Pixels:
        jpeg = self._jpeg  # read first: another thread sets the pixels before it drops the JPEG
        if self._pixels is None:
            whole = self._decode(jpeg, (0, 0, *self.size), None)
            with DECODING:
                self._pixels = self._fallback(jpeg) if whole is None else whole
            self._jpeg = b""
        x, y, width, height = part
        return self._pixels[y : y + height, x : x + width]

    def _decode(self, jpeg: bytes, part: Box, resize: DeferredResize | None) -> Pixels | None:
        if not jpeg:  # another thread has just decoded the whole image
            return None
        rows = part[3], part[2]
        with DECODING:
            if resize is not None:
                return resize.read(jpeg, self._full_size, self._scale, part)
            content = native.native.image_part(jpeg, self._full_size, self._scale, part, None, rows)
        return None if content is None else np.ndarray((*rows, 3), np.uint8, content)


class Deferred(NamedTuple):
    """Image as a description: a part of a source, turned, then resized.

    `mode` is "RGB", or "L" for a source whose channels are equal. `part` is (x, y, width, height) in the source.
    """

    source: PixelSource
    mode: str
    part: Box
    turn: Turn = UPRIGHT
    resizing: DeferredResize | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        if self.resizing is not None:
            box, turn = self.resizing.window, self.resizing.turn
        else:
            box, turn = self.part, self.turn
        return (box[3], box[2]) if turn[0] else (box[2], box[3])

    @property
    def is_whole(self) -> bool:
        """True for a whole source in RGB, upright and not resized."""
        as_decoded = self.turn == UPRIGHT and self.resizing is None
        return self.mode == "RGB" and as_decoded and self.part == (0, 0, *self.source.size)

    def crop(self, box: Box) -> Deferred:
        """Crop a box (x, y, width, height) within the image."""
        resizing = self.resizing
        if resizing is None:
            x, y, width, height = original_box(box, self.turn, self.part[2:])
            return self._replace(part=(self.part[0] + x, self.part[1] + y, width, height))
        x, y, width, height = original_box(box, resizing.turn, resizing.window[2:])
        window = resizing.window[0] + x, resizing.window[1] + y, width, height
        return self._replace(resizing=resizing._replace(window=window))

    def transpose(self, turn: Turn) -> Deferred:
        """Turn the image."""
        if self.resizing is None:
            return self._replace(turn=compose(self.turn, turn))
        return self._replace(resizing=self.resizing._replace(turn=compose(self.resizing.turn, turn)))

    def resize(self, resizing: DeferredResize) -> Deferred | None:
        """Resize the image; None if it has been resized before."""
        return None if self.resizing is not None else self._replace(resizing=resizing)

    def read(self) -> Pixels:
        """Contiguous pixels, (height, width, 3)."""
        return self.source.read(self.part, self.turn, self.resizing)

    def with_pixels(self, pixels: Pixels) -> Deferred:
        """The same image with its pixels."""
        return Deferred(PixelSource.of(pixels), self.mode, (0, 0, *self.size))


MAJOR = int(PIL.__version__.partition(".")[0])
"""Major version of Pillow."""


Change = Callable[[Deferred], Deferred | None]
"""Change of a deferred image; None if it takes a second resize."""


_FILTERS = frozenset({1, 2, 3, 4, 5})
"""LANCZOS, BILINEAR, BICUBIC, BOX and HAMMING."""


_LARGEST = 65_500
_TURNS: dict[int, Turn] = {
    Image.Transpose.FLIP_LEFT_RIGHT: (False, True, False),
    Image.Transpose.FLIP_TOP_BOTTOM: (False, False, True),
    Image.Transpose.ROTATE_90: (True, True, False),
    Image.Transpose.ROTATE_180: (False, True, True),
    Image.Transpose.ROTATE_270: (True, False, True),
    Image.Transpose.TRANSPOSE: (True, False, False),
    Image.Transpose.TRANSVERSE: (True, True, True),
}


def _same(deferred: Deferred) -> Deferred:
    return deferred


def _copy(image: Any) -> Change | None:  # noqa: ARG001 - the signature of all changes
    return _same


def _convert(image: Any, mode: Any = None) -> Change | None:
    """Convert to RGB; None with any further argument, or to other modes."""
    if not mode or mode == image.mode:
        return _same
    if mode != "RGB" or "transparency" in image.info:
        return None
    return lambda deferred: deferred._replace(mode="RGB")


def _crop(image: Any, box: Any = None) -> Change | None:
    """Crop a box within the image that has pixels; None for others."""
    if box is None:
        return _same
    x0, y0, x1, y1 = map(int, map(round, box))
    width, height = image.size
    within = 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height
    most = Image.MAX_IMAGE_PIXELS
    if not within or (most is not None and (x1 - x0) * (y1 - y0) > most):  # Pillow warns, or raises
        return None
    return lambda deferred: deferred.crop((x0, y0, x1 - x0, y1 - y0))


def _transpose(image: Any, method: Any) -> Change | None:  # noqa: ARG001 - as above
    turn = _TURNS.get(method)
    return None if turn is None else lambda deferred: deferred.transpose(turn)


def _resize(image: Any, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None) -> Change | None:
    """Resize with a filter that the kernels have; None for others."""
    if not isinstance(size, tuple | list):  # not every version of Pillow takes arrays
        return None
    width, height = (operator.index(side) for side in size)
    shown = image.size
    edges = (0, 0, *shown) if box is None else tuple(box)
    # As float32, like Pillow: it represents the sides of images exactly.
    left, top, right, bottom = map(float, edges if box is None else map(np.float32, edges))
    filter_ = Image.Resampling.BICUBIC if resample is None else resample
    within = 0 <= left < right <= shown[0] and 0 <= top < bottom <= shown[1]
    fits = 0 < width <= _LARGEST and 0 < height <= _LARGEST and max(shown) <= _LARGEST
    if not within or not fits or filter_ not in _FILTERS or _reduces_first((width, height), edges, reducing_gap):
        return None
    if (width, height) == shown and edges == (0, 0, *shown):
        return _same
    rounded = (left, top, right, bottom)
    resizing = DeferredResize(int(filter_), rounded, (width, height), (0, 0, width, height), across_first=MAJOR < 13)
    return lambda deferred: deferred.resize(resizing)


def _reduces_first(size: tuple[int, int], box: tuple[Any, ...], reducing_gap: Any) -> bool:
    """True if Pillow divides the size by a whole number first."""
    if reducing_gap is None:
        return False
    factors = (box[2] - box[0]) / size[0] / reducing_gap, (box[3] - box[1]) / size[1] / reducing_gap
    return bool(reducing_gap < 1 or max(map(int, factors)) > 1)


CHANGES: dict[str, Callable[..., Change | None]] = {
    "convert": _convert,
    "copy": _copy,
    "crop": _crop,
    "resize": _resize,
    "transpose": _transpose,
}
"""Methods of `PIL.Image.Image`, and the changes that they make; None leaves the call to Pillow."""
