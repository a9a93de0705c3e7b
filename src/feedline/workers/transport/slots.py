"""Reusable memory for batches: shared slots and buffers.

A slot or buffer is reused as soon as no array in any process refers to it.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from feedline.errors import WorkerError
from feedline.workers.transport.memory import Backing, Handle, Mapping, default_backing
from feedline.workers.transport.views import Bytes, base_array, tensor_over

if TYPE_CHECKING:
    from feedline.workers.transport.pickling import AddressRange


HEADER_NBYTES = 64
"""Offset of a slot's data; the first byte of the header is the state of the slot."""


# Both processes write this byte without a lock: the worker only while it is FREE, the training process only while it
# is LENT.
FREE, LENT, RETIRED = 0, 1, 2
"""Free: the worker may reuse it. Lent: in use by the training process. Retired: never reused."""


IDLE_MESSAGES = 256
"""Number of messages in a row without use after which a slot is freed."""


_PAGE_NBYTES = 4096


_SMALLEST_NBYTES = 64 * 1024


_FORGET_EVERY = 64


_FORGET_AT_MOST = 1024


class SlotMemoryError(WorkerError, MemoryError):
    """No memory or no descriptor for another slot of shared memory."""


class Slot:
    """Block of a worker's shared memory."""

    def __init__(self, number: int, mapping: Mapping, handle: Handle) -> None:
        self.number = number
        self.mapping = mapping
        self.handle: Handle | None = handle
        self.used_at = 0
        self._memory = np.asarray(mapping).data
        self._local: Callable[[], Bytes | None] = _no_reference

    @property
    def state(self) -> int:
        """FREE, LENT or RETIRED; the training process resets it without a lock."""
        return self._memory[0]

    @property
    def free(self) -> bool:
        """True if neither the training process nor this one uses it."""
        return self._memory[0] == FREE and self._local() is None

    def lend(self) -> None:
        self._memory[0] = LENT

    def bytes(self) -> Bytes:
        """Array of the whole slot; keeps the slot in use while alive."""
        # One array for all parts of a slot: it ends with the last of them, and so does the use of the slot.
        array = self._local()
        if array is None:
            array = base_array(self._memory)
            self._local = weakref.ref(array)
        return array

    def close(self) -> None:
        """Forget the slot; its last user frees the memory."""
        if isinstance(self.handle, int):
            os.close(self.handle)
        self.handle = None


class SlotPool:
    """All slots of one worker, in size classes.

    Classes are a quarter of a power of two apart.
    """

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
        """Return a free slot, at most twice as large, or create one.

        The slot counts as free until `Slot.bytes` is called. Raises SlotMemoryError if there is no memory for it.
        """
        slot = self._find_free(size_class(nbytes)) or self._create(size_class(nbytes))
        slot.used_at = self.clock
        return slot

    def find(self, span: AddressRange) -> Slot | None:
        """Slot that contains these addresses; None if there is none."""
        at = bisect_right(self._addresses, span.start) - 1
        if at < 0:
            return None
        slot = self._slots[at]
        return slot if span.stop <= slot.mapping.address + slot.mapping.nbytes else None

    def hand_over(self, slot: Slot) -> Handle | None:
        """Give the handle to the caller, to send it once.

        The caller owns the handle. None if it was handed over before.
        """
        handle, slot.handle = slot.handle, None
        self.unsent -= handle is not None
        return handle

    def tick(self) -> list[int]:
        """Count a message, and drop outdated slots at intervals.

        Returns the numbers of the dropped slots that the training process has mapped, and must drop, too.
        """
        self.clock += 1
        # Not for each message: there may be a thousand slots to check.
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
        # Larger ones are left to larger data: a small batch that is kept would hold all of their memory.
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
            raise SlotMemoryError(self._describe_shortage(nbytes, error)) from error
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

    def _describe_shortage(self, nbytes: int, error: OSError) -> str:
        lent = sum(slot.mapping.nbytes for slot in self._slots if slot.state == LENT)
        remedy = "Keep fewer batches, lower prefetch_factor or num_workers, or allow the process more memory."
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "Allow the process more open files (ulimit -n)."
        return (
            f"{nbytes} bytes of shared memory for a batch could not be allocated: {error.strerror}. "
            f"This worker has {len(self)} slots of {self.nbytes} bytes, {lent} bytes of them in batches that are in "
            f"transit or still referenced by the training process. {remedy}"
        )


def size_class(nbytes: int) -> int:
    """Round up to a size class, at most a quarter larger.

    Classes are 4, 5, 6 and 7 times a power of two.
    """
    nbytes = max(nbytes, _SMALLEST_NBYTES)
    step = 1 << max((nbytes - 1).bit_length() - 3, 0)
    return -(-nbytes // step) * step


def _no_reference() -> None:
    return None


ALONE_NBYTES = 256 * 1024
"""Data of at least this size gets a slot of its own, which is free as soon as the data is dropped."""


_ALIGNMENT = 64


class Allocation(NamedTuple):
    """Bytes of a slot from `start` on.

    `memory` is the whole slot and keeps it in use.
    """

    slot: Slot
    start: int
    memory: Bytes

    @property
    def address(self) -> int:
        return self.slot.mapping.address + self.start


class SlotAllocator:
    """Allocates memory in slots, aligned to 64 bytes."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._shared: Allocation | None = None
        self._packed_nbytes = 0
        self._expected_nbytes = 0

    def allocate(self, nbytes: int) -> Allocation:
        """Allocate a slot that holds nothing else."""
        slot = self._pool.take(nbytes)
        return Allocation(slot, HEADER_NBYTES, slot.bytes())

    def allocate_shared(self, nbytes: int) -> Allocation:
        """Allocate in the slot that small parts of the current message share."""
        nbytes = align(nbytes)
        allocation = self._shared
        if allocation is None or allocation.start + nbytes > len(allocation.memory):
            # Beyond the expected size, double: a message then needs few slots, however wrong the estimate was.
            allocation = self.allocate(max(nbytes, self._expected_nbytes - self._packed_nbytes, self._packed_nbytes))
        self._shared = allocation._replace(start=allocation.start + nbytes)
        self._packed_nbytes += nbytes
        return allocation

    def expect(self, nbytes: int) -> None:
        """Announce the bytes still to pack; a new shared slot fits them."""
        self._expected_nbytes = self._packed_nbytes + nbytes

    def finish(self) -> None:
        """End the message; size the next one's shared slot like this one's."""
        self._shared = None
        self._expected_nbytes, self._packed_nbytes = self._packed_nbytes, 0


def align(nbytes: int) -> int:
    """Round `nbytes` up to the alignment of allocations."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


LARGE_NBYTES = 4 << 20
"""Size in bytes below which tensors come from torch's allocator, which reuses such memory itself."""


IDLE_BATCHES = 256
"""Number of large tensors in a row without use after which a block is freed."""


class _PooledBlock:
    """Private mapping, in use while an array over it lives."""

    __slots__ = ("_local", "_memory", "nbytes", "used_at")

    def __init__(self, nbytes: int) -> None:
        # Private: after a fork by the user, neither process must see writes of the other one into a batch.
        if hasattr(mmap, "MAP_PRIVATE"):
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mapping = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(mapping)
        self._local: Callable[[], Bytes | None] = _no_reference
        self.nbytes = nbytes
        self.used_at = 0

    @property
    def free(self) -> bool:
        return self._local() is None

    def bytes(self) -> Bytes:
        array = base_array(self._memory)
        self._local = weakref.ref(array)
        return array


class BufferPool:
    """Allocator of uninitialized, contiguous CPU tensors that reuses large buffers.

    The first write to fresh pages costs several times as much as to pages in use. The pool grows with the number of
    batches that the loop keeps. Thread-safe.
    """

    smallest_nbytes = LARGE_NBYTES

    def __init__(self) -> None:
        self._blocks: list[_PooledBlock] = []
        self._lock = threading.Lock()
        self._clock = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LARGE_NBYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return tensor_over(self._take(nbytes), shape, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in list(self._blocks))

    @property
    def lent_nbytes(self) -> int:
        """Bytes of the blocks in use."""
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
            # Under the lock: until its array exists, a block counts as free.
            block.used_at = self._clock
            return block.bytes()

    def _drop_idle(self) -> None:
        oldest = self._clock - IDLE_BATCHES
        if any(block.used_at < oldest for block in self._blocks):
            self._blocks = [block for block in self._blocks if block.used_at >= oldest or not block.free]
