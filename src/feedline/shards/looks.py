"""What is seen of members while a tar is indexed: the sizes of pictures, and the lengths of the grids in them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from feedline import images
from feedline.errors import SampleError
from feedline.shards import names, npy
from feedline.shards.reading import Source
from feedline.shards.tar import Member

Measure = Callable[[memoryview], NDArray[np.uint16] | None]
"""From an encoded picture to the lengths of its restart intervals; None for one without a grid."""

Cell = tuple[int, int]
"""The row of a sample and the column of a field."""

_GLANCE_NBYTES = 64 << 10
"""Nearly every header lies in the first bytes, and an object need not give more."""
_MOST_NBYTES = 64 << 20
"""No more of a picture is held in memory, whatever size a header claims."""


class Looks:
    """Looks at the pictures among members as they come by; what cannot be read is told when its sample is."""

    def __init__(self, source: Source, measure: Measure | None) -> None:
        self._source = source
        self._measure = measure
        self.sizes: dict[Cell, tuple[int, int]] = {}
        """Width and height of pictures, and of arrays that may be pictures."""
        self.lengths: dict[Cell, NDArray[np.uint16]] = {}
        """Those of the intervals of JPEGs with a grid."""

    def add(self, cell: Cell, member: Member) -> None:
        """Look at a member if it may be a picture."""
        if names.is_image(member.name.lower()):
            self.sizes[cell] = self._picture(member)
            if self._measure is not None and member.size <= _MOST_NBYTES:
                lengths = self._measure(self._first(member, _MOST_NBYTES))
                if lengths is not None:
                    self.lengths[cell] = lengths
        elif may_be_picture(member.name.lower()):
            self.sizes[cell] = _array(self._first(member, _GLANCE_NBYTES), member.size)

    def _picture(self, member: Member) -> tuple[int, int]:
        for nbytes in (_GLANCE_NBYTES, _MOST_NBYTES):
            try:
                header = images.probe(self._first(member, nbytes))
            except (SampleError, ValueError):
                if member.size <= nbytes:
                    break
            else:
                return header.width, header.height
        return 0, 0

    def _first(self, member: Member, nbytes: int) -> memoryview:
        return self._source.view(member.start, min(member.size, nbytes))


def may_be_picture(name: str) -> bool:
    """Whether a field or member of this name may be a picture: one of its formats, or an array."""
    return names.is_image(name) or names.extension(name) == "npy"


def _array(data: memoryview, nbytes: int) -> tuple[int, int]:
    try:
        shape = npy.layout(data, nbytes).shape
    except ValueError:
        return 0, 0
    return (shape[1], shape[0]) if len(shape) == 3 and shape[2] == 3 else (0, 0)
