"""JPEGs with a grid for tests, and parts of them decoded by Pillow, which ignores grids."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feedline import _native

SAMPLINGS = ["4:4:4", "4:2:2", "4:2:0", "4:1:1", "4:4:0", "gray", "RGB"]

Box = tuple[int, int, int, int]


class Packed(NamedTuple):
    """A JPEG with a grid, and its lengths."""

    jpeg: bytes
    lengths: NDArray[np.uint16]

    def part(self, box: Box, denominator: int = 1) -> tuple[bytes, Box] | None:
        return _native.grid_assemble(self.jpeg, self.lengths, box, denominator)


def packed(jpeg: bytes) -> Packed:
    """The JPEG with a grid; it must have got one."""
    answer = _native.grid_rewrite(jpeg)
    assert not isinstance(answer, str), answer
    return Packed(answer[0], np.frombuffer(answer[1], np.uint16))


def pixels(jpeg: bytes, denominator: int = 1) -> NDArray[np.uint8]:
    """As Pillow decodes it, at full scale or at 1/denominator of it."""
    with Image.open(io.BytesIO(jpeg)) as image:
        if denominator > 1:
            image.draft(None, (image.width // denominator, image.height // denominator))
        return np.asarray(image)
