"""Memory of large batches that are built in the training process: used again as soon as nobody looks at it."""

from __future__ import annotations

import mmap
import threading
import weakref
from math import prod
from typing import TYPE_CHECKING

import torch

from feedline.transport.slots import size_class
from feedline.transport.views import tensor_over, watchable

if TYPE_CHECKING:
    from collections.abc import Callable

    from feedline.transport.views import Bytes

LARGE_NBYTES = 4 << 20
"""What is smaller comes from the allocator, which keeps such memory by itself."""

IDLE_BATCHES = 256
"""A block that nobody needed for so many large tensors is given back to the system."""


def _nothing() -> None:
    return None


class _Block:
    """One private mapping. While an array from `bytes()`, or anything made from it, lives, the block is not free."""

    __slots__ = ("_local", "_memory", "nbytes", "used_at")

    def __init__(self, nbytes: int) -> None:
        mapping = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(mapping)
        self._local: Callable[[], Bytes | None] = _nothing
        self.nbytes = nbytes
        self.used_at = 0

    @property
    def free(self) -> bool:
        return self._local() is None

    def bytes(self) -> Bytes:
        array = watchable(self._memory)
        self._local = weakref.ref(array)
        return array


class Recycled:
    """`recycled(shape, dtype)` gives an uninitialised, contiguous CPU tensor, a large one in memory used before.

    The first touch of fresh pages costs several times what writing a batch into warm ones does. A loop that keeps its
    batches makes this grow, as they would have anyway. Safe to use from several threads.
    """

    smallest_nbytes = LARGE_NBYTES

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()
        self._clock = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LARGE_NBYTES:
            return torch.empty(shape, dtype=dtype)
        return tensor_over(self._take(nbytes), shape, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in list(self._blocks))

    @property
    def lent_nbytes(self) -> int:
        """Bytes of the blocks that somebody looks at."""
        return sum(block.nbytes for block in list(self._blocks) if not block.free)

    def _take(self, nbytes: int) -> Bytes:
        size = size_class(nbytes)
        with self._lock:
            self._clock += 1
            self._drop_idle()
            block = next((block for block in self._blocks if block.free and size <= block.nbytes < 2 * size), None)
            if block is None:
                block = _Block(size)
                self._blocks.append(block)
            block.used_at = self._clock
            return block.bytes()

    def _drop_idle(self) -> None:
        oldest = self._clock - IDLE_BATCHES
        if any(block.used_at < oldest for block in self._blocks):
            self._blocks = [block for block in self._blocks if block.used_at >= oldest or not block.free]
