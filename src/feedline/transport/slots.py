"""A worker's slots: shared memory that is used again as soon as nobody, in any process, looks at it."""

from __future__ import annotations

import errno
import os
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from feedline.errors import WorkerError
from feedline.transport.memory import default_backing
from feedline.transport.views import watchable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from feedline.transport.memory import Backing, Handle, Mapping
    from feedline.transport.parcel import Span
    from feedline.transport.views import Bytes

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


class Shelf:
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

    def find(self, span: Span) -> Slot | None:
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
