"""Methods of Pillow's images as changes of deferred images.

Each takes the image and the arguments of the method. It returns None for arguments that it does not know.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL
from PIL import Image

from feedline.images.deferred import Deferred, DeferredResize, Turn

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
    """DeferredResize with a filter that the kernels have; None for others."""
    if not isinstance(size, tuple | list):  # not every version of Pillow takes arrays
        return None
    width, height = (operator.index(side) for side in size)
    shown = image.size
    edges = (0, 0, *shown) if box is None else tuple(box)
    # As Pillow passes them on: as float32, which holds the sides of images exactly.
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
