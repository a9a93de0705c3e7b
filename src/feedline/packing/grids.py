"""JPEGs with restart markers on a grid: rewriting without loss, and finding the lengths again."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline import _kernels
from feedline.errors import MissingExtraError

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


def measured(jpeg: memoryview) -> Lengths | None:
    """The lengths of a JPEG's intervals, found by reading all of it; None for one without a grid."""
    if not hasattr(_kernels.native, "grid_measure"):
        return None
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
