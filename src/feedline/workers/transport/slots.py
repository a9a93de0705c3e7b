"""A worker's slots: shared memory that is used again as soon as nobody, in any process, looks at it.

Room for new data in a worker's slots: large things get a slot of their own, small ones share.

Memory of large batches that are built in the training process: used again as soon as nobody looks at it.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from feedline.errors import WorkerError
from feedline.workers.transport.memory import default_backing
from feedline.workers.transport.views import tensor_over, watchable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from feedline.workers.transport.memory import Backing, Handle, Mapping
    from feedline.workers.transport.pickling import AddressRange
    from feedline.workers.transport.views import Bytes


HEADER_NBYTES = 64
"""A slot's data begins here; the first byte of the header says who may use the slot."""


FREE, LENT, RETIRED = 0, 1, 2
"""Free: the worker may reuse it. Lent: the training process looks at it. Retired: to be forgotten, never reused."""


IDLE_MESSAGES = 256
"""A slot that no message needed for so long is given back to the system."""


_PAGE_NBYTES = 4096


_SMALLEST_NBYTES = 64 * 1024


_FORGET_EVERY = 64


_FORGET_AT_MOST = 1024


class SlotMemoryError(WorkerError, MemoryError):
    """No memory, or no descriptor, for another slot; the message says how much is in use and what to change."""


class Slot:
    """One stretch of shared memory of a worker."""

    def __init__(self, number: int, mapping: Mapping, handle: Handle) -> None:
        self.number = number
        self.mapping = mapping
        self.handle: Handle | None = handle
        self.used_at = 0
        self._memory = np.asarray(mapping).data
        self._local: Callable[[], Bytes | None] = _nothing

    @property
    def state(self) -> int:
        """FREE, LENT or RETIRED, as the training process left it."""
        return self._memory[0]

    @property
    def free(self) -> bool:
        """Whether nobody looks at it, neither the training process nor this one."""
        return self._memory[0] == FREE and self._local() is None

    def lend(self) -> None:
        self._memory[0] = LENT

    def bytes(self) -> Bytes:
        """The whole slot. While this array, or anything made from it, lives in this process, the slot is not free."""
        array = self._local()
        if array is None:
            array = watchable(self._memory)
            self._local = weakref.ref(array)
        return array

    def close(self) -> None:
        """Forget the slot; its memory goes when nothing in any process looks at it."""
        if isinstance(self.handle, int):
            os.close(self.handle)
        self.handle = None


class SlotPool:
    """All slots of one worker. Slots are of few sizes, a quarter of a power of two apart, to fit again."""

    def __init__(self, backing: Backing | None = None) -> None:
        self._backing = backing or default_backing()
        self._by_size: dict[int, list[Slot]] = {}
        self._addresses: list[int] = []
        self._slots: list[Slot] = []  # in the order of their addresses
        self.clock = 0
        self.created = 0
        self.unsent = 0
        self.nbytes = 0
        self.peak_nbytes = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, nbytes: int) -> Slot:
        """A free slot for that much data, at most twice as large, or a new one. Call `bytes()` to keep it."""
        slot = self._find_free(size_class(nbytes)) or self._create(size_class(nbytes))
        slot.used_at = self.clock
        return slot

    def find(self, span: AddressRange) -> Slot | None:
        """The slot that the span lies in."""
        at = bisect_right(self._addresses, span.start) - 1
        if at < 0:
            return None
        slot = self._slots[at]
        return slot if span.stop <= slot.mapping.address + slot.mapping.nbytes else None

    def hand_over(self, slot: Slot) -> Handle | None:
        """The slot's handle if the training process has not got it yet; whoever calls closes it."""
        handle, slot.handle = slot.handle, None
        self.unsent -= handle is not None
        return handle

    def tick(self) -> list[int]:
        """Count a message; the numbers of slots that the training process should forget, as this worker just did."""
        self.clock += 1
        if self.clock % _FORGET_EVERY:
            return []
        outdated = [slot for slot in self._slots if self._is_outdated(slot)][:_FORGET_AT_MOST]
        known = [slot.number for slot in outdated if slot.handle is None]
        for slot in outdated:
            self._forget(slot)
        return known

    def close(self) -> None:
        for slot in list(self._slots):
            self._forget(slot)

    def _find_free(self, size: int) -> Slot | None:
        largest = 2 * size
        while size < largest:
            for slot in self._by_size.get(size, ()):
                if slot.free:
                    return slot
            size = size_class(size + 1)
        return None

    def _create(self, size: int) -> Slot:
        nbytes = -(-(HEADER_NBYTES + size) // _PAGE_NBYTES) * _PAGE_NBYTES
        try:
            mapping, handle = self._backing.create(nbytes)
        except OSError as error:
            raise SlotMemoryError(self._shortage(nbytes, error)) from error
        slot = Slot(self.created, mapping, handle)
        self.created += 1
        self.unsent += 1
        self._by_size.setdefault(size, []).append(slot)
        at = bisect_right(self._addresses, mapping.address)
        self._addresses.insert(at, mapping.address)
        self._slots.insert(at, slot)
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return slot

    def _forget(self, slot: Slot) -> None:
        at = self._slots.index(slot)
        del self._slots[at], self._addresses[at]
        for slots in self._by_size.values():
            if slot in slots:
                slots.remove(slot)
        self.nbytes -= slot.mapping.nbytes
        self.unsent -= slot.handle is not None
        slot.close()

    def _is_outdated(self, slot: Slot) -> bool:
        return slot.state == RETIRED or (slot.free and self.clock - slot.used_at > IDLE_MESSAGES)

    def _shortage(self, nbytes: int, error: OSError) -> str:
        lent = sum(slot.mapping.nbytes for slot in self._slots if slot.state == LENT)
        remedy = "Keep fewer batches, lower prefetch_factor or num_workers, or allow the process more memory."
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "Allow the process more open files (ulimit -n)."
        return (
            f"{nbytes} bytes of shared memory for a batch could not be had: {error.strerror}. "
            f"This worker has {len(self)} slots of {self.nbytes} bytes, {lent} bytes of them in batches that are on "
            f"their way or still kept by the training process. {remedy}"
        )


def size_class(nbytes: int) -> int:
    """The smallest 4, 5, 6 or 7 times a power of two that is not below `nbytes`: at most a quarter more."""
    nbytes = max(nbytes, _SMALLEST_NBYTES)
    step = 1 << max((nbytes - 1).bit_length() - 3, 0)
    return -(-nbytes // step) * step


def _nothing() -> None:
    return None


ALONE_NBYTES = 256 * 1024
"""From this size on, data has a slot of its own, so that its memory is free again as soon as it is dropped."""


_ALIGNMENT = 64


class Allocation(NamedTuple):
    """Bytes of a slot, from `start`. `memory` is the whole slot and keeps it from being used for anything else."""

    slot: Slot
    start: int
    memory: Bytes

    @property
    def address(self) -> int:
        return self.slot.mapping.address + self.start


class SlotAllocator:
    """Hands out room, aligned to 64 bytes."""

    def __init__(self, shelf: SlotPool) -> None:
        self._shelf = shelf
        self._common: Allocation | None = None
        self._packed_nbytes = 0
        self._expected_nbytes = 0

    def alone(self, nbytes: int) -> Allocation:
        """Room in a slot that holds nothing else."""
        slot = self._shelf.take(nbytes)
        return Allocation(slot, HEADER_NBYTES, slot.bytes())

    def shared(self, nbytes: int) -> Allocation:
        """Room in the slot that the small things of the current message share."""
        nbytes = aligned(nbytes)
        room = self._common
        if room is None or room.start + nbytes > len(room.memory):
            # Beyond what was expected, as much again as there was: a message needs few slots however wrong the guess.
            room = self.alone(max(nbytes, self._expected_nbytes - self._packed_nbytes, self._packed_nbytes))
        self._common = room._replace(start=room.start + nbytes)
        self._packed_nbytes += nbytes
        return room

    def expect(self, nbytes: int) -> None:
        """Say how much of the current message is still to be packed: a new common slot will have room for it."""
        self._expected_nbytes = self._packed_nbytes + nbytes

    def finish(self) -> None:
        """The message is complete: what follows shares another slot, of the size that this one needed."""
        self._common = None
        self._expected_nbytes, self._packed_nbytes = self._packed_nbytes, 0


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to the alignment of rooms."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


LARGE_NBYTES = 4 << 20
"""What is smaller comes from the allocator, which keeps such memory by itself."""


IDLE_BATCHES = 256
"""A block that nobody needed for so many large tensors is given back to the system."""


class _PooledBlock:
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


class BufferPool:
    """`recycled(shape, dtype)` gives an uninitialized, contiguous CPU tensor, a large one in memory used before.

    The first touch of fresh pages costs several times what writing a batch into warm ones does. A loop that keeps its
    batches makes this grow, as they would have anyway. Safe to use from several threads.
    """

    smallest_nbytes = LARGE_NBYTES

    def __init__(self) -> None:
        self._blocks: list[_PooledBlock] = []
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
                block = _PooledBlock(size)
                self._blocks.append(block)
            block.used_at = self._clock
            return block.bytes()

    def _drop_idle(self) -> None:
        oldest = self._clock - IDLE_BATCHES
        if any(block.used_at < oldest for block in self._blocks):
            self._blocks = [block for block in self._blocks if block.used_at >= oldest or not block.free]
