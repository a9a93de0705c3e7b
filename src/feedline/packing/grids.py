"""JPEGs with restart markers on a grid: rewriting without loss, and finding the lengths again."""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline import _kernels
from feedline.errors import MissingExtraError
from feedline.shards import is_image, members

Lengths = NDArray[np.uint16]
"""Bytes of each restart interval, its marker included, in scan order."""


class Rewritten(NamedTuple):
    """A JPEG with a grid and the lengths of its intervals; or as it was, without lengths, and the reason."""

    jpeg: bytes
    lengths: Lengths | None
    reason: str


def rewritten(jpeg: bytes) -> Rewritten:
    """The JPEG with a grid, the same pixels bit for bit. Holds no lock of the interpreter."""
    answer = _native().grid_rewrite(jpeg)
    if isinstance(answer, str):
        return Rewritten(jpeg, None, answer)
    return Rewritten(answer[0], np.frombuffer(answer[1], np.uint16), "")


def grids_in(tar: str) -> dict[str, Lengths]:
    """The lengths of all JPEGs with a grid in a tar, by member name; found by reading the whole tar."""
    found = dict[str, Lengths]()
    pictures = [member for member in members(tar, allow_truncated=True) if is_image(member.name)]
    if pictures and _kernels.native is not None and hasattr(_kernels.native, "grid_measure"):
        with (
            open(tar, "rb", buffering=0) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
            memoryview(mapping) as view,
        ):
            for member in pictures:
                lengths = _measured(view[member.start : member.start + member.size])
                if lengths is not None:
                    found[member.name] = lengths
    return found


def _measured(jpeg: memoryview) -> Lengths | None:
    with jpeg:
        lengths = _native().grid_measure(jpeg)
    return None if lengths is None else np.frombuffer(lengths, np.uint16)


def require() -> None:
    """MissingExtraError where the native kernels, which alone can rewrite, are not there."""
    _native()


def _native() -> Any:
    if not hasattr(_kernels.native, "grid_rewrite"):
        raise MissingExtraError(
            "--grid needs feedline's native image kernels, which were not built: install a C++ compiler and the headers"
            " of libjpeg-turbo (Debian: libjpeg62-turbo-dev), then: pip install --force-reinstall feedline"
        )
    return _kernels.native
