"""Arrays that are mapped from a file travel as the file's name, and are mapped again."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MappedArray(NamedTuple):
    """An array within the `nbytes` bytes of a file from `position` on; its first element is `offset` bytes in."""

    filename: str | Path
    mode: str
    position: int
    nbytes: int
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    plain: bool

    def open(self) -> NDArray[Any]:
        """The array, mapped anew: a memmap, or, if it was a plain array over one, a plain array."""
        file = np.memmap(self.filename, np.uint8, self.mode, self.position, (self.nbytes,))  # type: ignore[call-overload]
        first = file[self.offset : self.offset + self.dtype.itemsize].view(self.dtype)
        array = as_strided(first, self.shape, self.strides, subok=True)
        return array.view(np.ndarray) if self.plain else array


def reduce_file(array: NDArray[Any]) -> Any:
    """For `reducer_override`: how to map the array again, or None if it is not mapped from a file that still has it.

    An array opened with mode "c" is reopened so, without what was written to it.
    """
    if array.size == 0 or type(array) not in (np.ndarray, np.memmap) or (file := file_of(array)) is None:
        return None
    low, high = bounds_of(array)
    start = np.frombuffer(file._mmap, np.uint8).__array_interface__["data"][0]  # type: ignore[attr-defined]
    position = file.offset - file.offset % mmap.ALLOCATIONGRANULARITY + low - start
    filename = file.filename
    if filename is None or not _reaches(filename, position + high - low):
        return None
    address = array.__array_interface__["data"][0]
    mapped = MappedArray(
        filename,
        "r+" if file.mode == "w+" else file.mode,
        position,
        high - low,
        address - low,
        array.dtype,
        array.shape,
        array.strides,
        type(array) is np.ndarray,
    )
    return MappedArray.open, (mapped,)


def file_of(array: NDArray[Any]) -> np.memmap[Any, Any] | None:
    """The memmap that the array is, or is a view of."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        if isinstance(owner, np.memmap) and owner._mmap is not None:  # type: ignore[attr-defined]
            return owner
        owner = owner.base
    return None


def bounds_of(array: NDArray[Any]) -> tuple[int, int]:
    """The addresses of its first byte and of the one after its last."""
    reach = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    address: int = array.__array_interface__["data"][0]
    return address + sum(r for r in reach if r < 0), address + sum(r for r in reach if r > 0) + array.itemsize


def _reaches(filename: str | Path, nbytes: int) -> bool:
    try:
        return Path(filename).stat().st_size >= nbytes
    except OSError:
        return False
