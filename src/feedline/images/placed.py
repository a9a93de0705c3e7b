"""Rows whose crop, size and flips are decided by the caller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core.stage_parts import DECODING, TRANSFORMING
from feedline.images import native
from feedline.images.pillow import ImageSource

Table = NDArray[np.float32]
"""Number of each level in each channel, (3, 256)."""


PLACEMENT = 10
"""Integers of a placement: see `PlacedReader.read`."""


_LEVELS, _FLOATS = 0, 1
_WHOLE = 2


class Resampling(NamedTuple):
    """Filter of an antialiased resize.

    The levels equal the levels of Pillow, or of torch's `interpolate`.
    """

    bicubic: bool = False
    torchs: bool = False


BILINEAR = Resampling()


class PlacedReader:
    """Kernels that write rows at given places, with every pixel decoded.

    Rows are uint8 levels, or float32 numbers from `table`. `planar` rows are (3, height, width), others (height, width,
    3). With `mean` and `std`, the kernels may compute the table if that gives the same bits. Boxes are resized with the
    levels of `resampling`.
    """

    def __init__(
        self,
        table: Table | None = None,
        *,
        planar: bool = False,
        resampling: Resampling = BILINEAR,
        mean: Sequence[float] = (0, 0, 0),
        std: Sequence[float] = (1, 1, 1),
    ) -> None:
        self._plan = native.native.ImagePlan(
            (1, 1), _WHOLE, (0, 0, 0, 0), flip=0.0, bicubic=resampling.bicubic, planar=planar,
            number=_LEVELS if table is None else _FLOATS,
            values=np.zeros((3, 256), np.float32) if table is None else np.ascontiguousarray(table),
            mean=mean, std=std, oriented=False, scaled=False, torchs=resampling.torchs,
        )  # fmt: skip

    def read(
        self, sources: Sequence[ImageSource], out: NDArray[Any], placements: NDArray[np.int64], limit: int = 0
    ) -> list[tuple[int, int, int, str]] | None:
        """Write row i of `out` from `sources[i]`, without the GIL.

        A placement holds x, y, width and height of the box; flip and upended (mirrored left to right, top to bottom);
        height and width of the resized box; left and top of the window, which has the size of a row. Pixels of the
        window outside of the resized box are black. Images of more than `limit` pixels are refused; 0 means no limit.
        Returns None if all rows were written, else the number of each unwritten row, and the reason.
        """
        is_decoded = len(sources) and isinstance(sources[0], np.ndarray)
        with TRANSFORMING if is_decoded else DECODING:
            unwritten: list[tuple[int, int, int, str]] | None = self._plan.read_placed(
                sources, out, placements, limit, 1
            )
        return unwritten


@lru_cache(maxsize=4)
def level_reader(resampling: Resampling) -> PlacedReader:
    """Reader of levels, (height, width, 3)."""
    return PlacedReader(resampling=resampling)


def can_place() -> bool:
    """True if the kernels for placed rows were built."""
    return native.native is not None
