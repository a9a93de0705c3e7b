"""Sending side of the transport: small messages, batches in slots."""

from __future__ import annotations

import ctypes
import math
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from feedline.errors import NotPicklableError
from feedline.workers.transport.explain import explain_unpicklable
from feedline.workers.transport.pickling import (
    INLINE_NBYTES,
    AddressRange,
    MixedPickler,
    Pickling,
    ReferencePickler,
    dump_out_of_band,
)
from feedline.workers.transport.slots import ALONE_NBYTES, FREE, LENT, Allocation, Slot, SlotAllocator, SlotPool, align
from feedline.workers.transport.views import Bytes, tensor_over
from feedline.workers.transport.wire import Envelope, MessageContents, OpenedSlot, SlotRange

if TYPE_CHECKING:
    from feedline.workers.transport.memory import Backing


UNSENT_LIMIT = 64
"""Number of unsent slots from which `Arena.empty` uses ordinary memory."""


_APART_LIMIT = 32
"""Highest number of large regions with slots of their own; the regions of a message with more share slots."""


MAX_FDS = UNSENT_LIMIT + _APART_LIMIT + 4
"""Highest number of descriptors per message, for `socket.recv_fds` (Linux allows 253)."""


_INLINE_TOTAL_NBYTES = 32 * 1024


_BODY_NBYTES = 48 * 1024


class Message(NamedTuple):
    """Encoded batch: below 64 KiB, and descriptors of new slots."""

    payload: bytes
    fds: tuple[int, ...]

    def sent(self) -> None:
        """Close the descriptors, after the message was sent or dropped."""
        for fd in self.fds:
            os.close(fd)


class OutgoingMessage:
    """Message under construction; slots are lent only when it is complete."""

    def __init__(self, pool: SlotPool, allocator: SlotAllocator) -> None:
        self._pool = pool
        self._allocator = allocator
        self._used: dict[int, Slot] = {}
        self._memory: list[Bytes] = []
        self.copied_nbytes = 0

    def place(self, regions: Sequence[AddressRange]) -> list[SlotRange | bytearray]:
        """Place every region: inline, in its slot, or copied to a slot."""
        placed: dict[int, SlotRange | bytearray] = {}
        inline_nbytes = 0
        copied = []
        for number, span in enumerate(regions):
            nbytes = span.stop - span.start
            if nbytes < INLINE_NBYTES and inline_nbytes + nbytes <= _INLINE_TOTAL_NBYTES:
                inline_nbytes += nbytes
                placed[number] = span.copy()
            # The memory of a lent slot belongs to an earlier batch, which may be written to: such data are copied.
            elif (slot := self._pool.find(span)) is not None and slot.state == FREE:
                placed[number] = self._use(slot, span.start - span.pad - slot.mapping.address, nbytes + span.pad)
            else:
                copied.append(number)
        if copied:
            placed.update(zip(copied, self._copy([regions[number] for number in copied]), strict=True))
        return [placed[number] for number in range(len(regions))]

    def finish(self, contents_nbytes: int, body: bytes) -> Message:
        """Complete the message and lend its slots to the receiver."""
        place: bytes | SlotRange = body
        if len(body) > _BODY_NBYTES:
            place = self._fill(self._allocator.allocate(len(body)), 0, body, len(body))
        opened = [(slot, self._pool.hand_over(slot)) for slot in self._used.values() if slot.handle is not None]
        # Last: after an error before this line, all slots still belong to the worker.
        for slot in self._used.values():
            slot.lend()
        envelope = Envelope(
            [
                OpenedSlot(s.number, s.mapping.nbytes, handle if isinstance(handle, str) else None)
                for s, handle in opened
            ],
            self._pool.tick(),
            contents_nbytes,
            place,
        )
        return Message(pickle.dumps(envelope, 5), tuple(handle for _, handle in opened if isinstance(handle, int)))

    def _copy(self, spans: list[AddressRange]) -> list[SlotRange]:
        large = [span for span in spans if span.stop - span.start >= ALONE_NBYTES]
        apart = set(large) if len(large) <= _APART_LIMIT else set()
        self._allocator.expect(sum(align(span.stop - span.start + span.pad) for span in spans if span not in apart))
        return [self._copy_one(span, span in apart) for span in spans]

    def _copy_one(self, span: AddressRange, apart: bool) -> SlotRange:
        nbytes = span.stop - span.start + span.pad
        allocation = self._allocator.allocate(nbytes) if apart else self._allocator.allocate_shared(nbytes)
        self.copied_nbytes += span.stop - span.start
        return self._fill(allocation, span.pad, span.start, span.stop - span.start)

    def _fill(self, allocation: Allocation, pad: int, source: int | bytes, nbytes: int) -> SlotRange:
        # Until the message is complete, only this array keeps the slot from being taken for its next part.
        self._memory.append(allocation.memory)
        ctypes.memmove(allocation.address + pad, source, nbytes)
        return self._use(allocation.slot, allocation.start, pad + nbytes)

    def _use(self, slot: Slot, start: int, nbytes: int) -> SlotRange:
        self._used[slot.number] = slot
        return SlotRange(slot.number, start, nbytes)


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Shared memory of one worker."""

    slots: int
    """Slots that exist."""
    nbytes: int
    """Bytes of all slots, free or not."""
    lent_nbytes: int
    """Bytes of the slots that are in transit or used by the training process."""
    peak_nbytes: int
    """Maximum of `nbytes` so far."""
    created: int
    """Slots created so far. While this is constant, no fresh memory is touched."""
    copied_nbytes: int
    """Bytes copied into slots so far; 0 if the memory of all batches came from `Arena.empty`."""


class Arena:
    """Slots of one worker, and the encoder of its messages. Not thread-safe."""

    def __init__(self, backing: Backing | None = None) -> None:
        self._pool = SlotPool(backing)
        self._allocator = SlotAllocator(self._pool)
        self._copied_nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialized tensor that `dumps` sends without a copy.

        Views of the tensor are sent without a copy, too. The memory is reused once the tensor is dropped here and, if
        it was sent, in the training process. A worker that keeps a sent tensor shares it with the training process, as
        with torch's shared memory. Tensors below 16 KiB are in ordinary memory, and so are all while `UNSENT_LIMIT`
        slots are unsent.
        """
        shape = tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < INLINE_NBYTES or self._pool.unsent >= UNSENT_LIMIT:
            return torch.empty(shape, dtype=dtype, device="cpu")
        allocation = (
            self._allocator.allocate(nbytes) if nbytes >= ALONE_NBYTES else self._allocator.allocate_shared(nbytes)
        )
        return tensor_over(allocation.memory[allocation.start : allocation.start + nbytes], shape, dtype)

    def dumps(self, obj: Any) -> Message:
        """Encode `obj` for the `Inbox` of this worker.

        The inbox must read every message, in order. Memory outside slots is copied: large memory into slots, and small
        memory into the message. Raises NotPicklableError with the path of the part that cannot be pickled, and
        SlotMemoryError if there is no memory for another slot.
        """
        stream, oob = pickle_batch(obj)
        layout = oob.layout(lambda span: self._pool.find(span) is not None, as_torch=True)
        outgoing = OutgoingMessage(self._pool, self._allocator)
        try:
            regions = outgoing.place(layout.regions)
            contents = MessageContents(regions, layout.places, oob.views).encode()
            message = outgoing.finish(len(contents), contents + stream)
        finally:
            self._allocator.finish()
        self._copied_nbytes += outgoing.copied_nbytes
        return message

    def statistics(self) -> ArenaStatistics:
        pool = self._pool
        lent = sum(slot.mapping.nbytes for slot in pool if slot.state == LENT)
        return ArenaStatistics(len(pool), pool.nbytes, lent, pool.peak_nbytes, pool.created, self._copied_nbytes)

    def close(self) -> None:
        """Drop all slots; their tensors stay valid in both processes."""
        self._allocator.finish()
        self._pool.close()


def pickle_batch(obj: Any) -> Pickling:
    """Pickle a batch, with functions and classes by name, else by value.

    Raises NotPicklableError with the path of the part that cannot be pickled.
    """
    try:
        return dump_out_of_band(obj, ReferencePickler)
    except Exception as error:  # noqa: BLE001 - reported below, unless the other pickler knows better
        first_error = error
    try:
        return dump_out_of_band(obj, MixedPickler)
    except Exception:  # noqa: BLE001 - the first error is the one that an ordinary pickling gives
        path = explain_unpicklable(obj, "batch", lambda part: dump_out_of_band(part, MixedPickler))
    raise NotPicklableError(
        f"{path} cannot be sent to the training process: {first_error}. "
        "Return tensors, arrays, numbers, strings and containers of them from the dataset or collate_fn."
    ) from first_error
