"""The worker's side of the transport: batches leave as small messages, their memory stays in slots.

One batch on its way out of a worker: what is copied into slots, what lies there already, what goes along.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from feedline.errors import NotPicklableError
from feedline.workers.transport.explain import explain_unpicklable
from feedline.workers.transport.pickling import INLINE_NBYTES, MixedPickler, Pickling, ReferencePickler, pickled
from feedline.workers.transport.slots import ALONE_NBYTES, FREE, LENT, SlotAllocator, SlotPool, aligned
from feedline.workers.transport.views import tensor_over
from feedline.workers.transport.wire import Envelope, MessageContents, OpenedSlot, SlotRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from feedline.workers.transport.memory import Backing
    from feedline.workers.transport.pickling import AddressRange
    from feedline.workers.transport.slots import Allocation, Slot
    from feedline.workers.transport.views import Bytes


UNSENT_LIMIT = 64
"""While so many slots have never been sent, no more are made in advance."""


_APART_LIMIT = 32
"""A message with more large regions than this has them all in one slot."""


MAX_FDS = UNSENT_LIMIT + _APART_LIMIT + 4
"""No message carries more descriptors than this; what `socket.recv_fds` should be ready for (Linux allows 253)."""


_INLINE_TOTAL_NBYTES = 32 * 1024


_BODY_NBYTES = 48 * 1024


class Message(NamedTuple):
    """A batch, ready to be sent: less than 64 KiB, and the descriptors of slots that the receiver has not seen yet."""

    payload: bytes
    fds: tuple[int, ...]

    def sent(self) -> None:
        """Close the descriptors; to be called once they are sent, or will never be."""
        for fd in self.fds:
            os.close(fd)


class OutgoingMessage:
    """One message in the making: nothing is lent until it is complete."""

    def __init__(self, shelf: SlotPool, rooms: SlotAllocator) -> None:
        self._shelf = shelf
        self._rooms = rooms
        self._used: dict[int, Slot] = {}
        self._held: list[Bytes] = []
        self.copied_nbytes = 0

    def place(self, regions: Sequence[AddressRange]) -> list[SlotRange | bytearray]:
        """Every region as bytes, where they lie already, or where they are copied to."""
        placed: dict[int, SlotRange | bytearray] = {}
        inline_nbytes = 0
        copied = []
        for number, span in enumerate(regions):
            nbytes = span.stop - span.start
            if nbytes < INLINE_NBYTES and inline_nbytes + nbytes <= _INLINE_TOTAL_NBYTES:
                inline_nbytes += nbytes
                placed[number] = span.copy()
            elif (slot := self._shelf.find(span)) is not None and slot.state == FREE:
                placed[number] = self._use(slot, span.start - span.pad - slot.mapping.address, nbytes + span.pad)
            else:
                copied.append(number)
        if copied:
            placed.update(zip(copied, self._copy([regions[number] for number in copied]), strict=True))
        return [placed[number] for number in range(len(regions))]

    def message(self, contents_nbytes: int, body: bytes) -> Message:
        """The finished message; from here on its slots are lent."""
        place: bytes | SlotRange = body
        if len(body) > _BODY_NBYTES:
            place = self._fill(self._rooms.alone(len(body)), 0, body, len(body))
        opened = [(slot, self._shelf.hand_over(slot)) for slot in self._used.values() if slot.handle is not None]
        for slot in self._used.values():
            slot.lend()
        envelope = Envelope(
            [
                OpenedSlot(s.number, s.mapping.nbytes, handle if isinstance(handle, str) else None)
                for s, handle in opened
            ],
            self._shelf.tick(),
            contents_nbytes,
            place,
        )
        return Message(pickle.dumps(envelope, 5), tuple(handle for _, handle in opened if isinstance(handle, int)))

    def _copy(self, spans: list[AddressRange]) -> list[SlotRange]:
        large = [span for span in spans if span.stop - span.start >= ALONE_NBYTES]
        apart = set(large) if len(large) <= _APART_LIMIT else set()
        self._rooms.expect(sum(aligned(span.stop - span.start + span.pad) for span in spans if span not in apart))
        return [self._copy_one(span, span in apart) for span in spans]

    def _copy_one(self, span: AddressRange, apart: bool) -> SlotRange:
        nbytes = span.stop - span.start + span.pad
        room = self._rooms.alone(nbytes) if apart else self._rooms.shared(nbytes)
        self.copied_nbytes += span.stop - span.start
        return self._fill(room, span.pad, span.start, span.stop - span.start)

    def _fill(self, room: Allocation, pad: int, source: int | bytes, nbytes: int) -> SlotRange:
        self._held.append(room.memory)
        ctypes.memmove(room.address + pad, source, nbytes)
        return self._use(room.slot, room.start, pad + nbytes)

    def _use(self, slot: Slot, start: int, nbytes: int) -> SlotRange:
        self._used[slot.number] = slot
        return SlotRange(slot.number, start, nbytes)


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """The shared memory of one worker."""

    slots: int
    """Slots that exist."""
    nbytes: int
    """Bytes of all slots, free or not."""
    lent_nbytes: int
    """Bytes of the slots that are on their way or held by the training process."""
    peak_nbytes: int
    """The most that `nbytes` ever was."""
    created: int
    """Slots ever made: while this stands still, no fresh memory is touched."""
    copied_nbytes: int
    """Bytes ever copied into slots because they lay elsewhere; zero when all batches were made with `empty`."""


class Arena:
    """The slots of one worker. Not thread-safe."""

    def __init__(self, backing: Backing | None = None) -> None:
        self._shelf = SlotPool(backing)
        self._rooms = SlotAllocator(self._shelf)
        self._copied_nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor that `dumps` sends without copying it, as it does all views of it.

        Its memory is used again once it is dropped here and, if it was sent, in the training process. A worker that
        keeps a tensor it has sent shares it with the training process, as with torch's shared memory. Small tensors
        are ordinary memory.
        """
        shape = tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < INLINE_NBYTES or self._shelf.unsent >= UNSENT_LIMIT:
            return torch.empty(shape, dtype=dtype, device="cpu")
        room = self._rooms.alone(nbytes) if nbytes >= ALONE_NBYTES else self._rooms.shared(nbytes)
        return tensor_over(room.memory[room.start : room.start + nbytes], shape, dtype)

    def dumps(self, obj: Any) -> Message:
        """`obj` as a message for the `Inbox` of this worker, which must read every message, in their order.

        Memory that lies in no slot is copied into one. Raises NotPicklableError with the path of what cannot be
        pickled, and SlotMemoryError if there is no memory for another slot.
        """
        stream, parcel = _pickle(obj)
        layout = parcel.layout(lambda span: self._shelf.find(span) is not None)
        shipment = OutgoingMessage(self._shelf, self._rooms)
        try:
            regions = shipment.place(layout.regions)
            contents = MessageContents(regions, layout.places, parcel.views).encode()
            message = shipment.message(len(contents), contents + stream)
        finally:
            self._rooms.finish()
        self._copied_nbytes += shipment.copied_nbytes
        return message

    def statistics(self) -> ArenaStatistics:
        shelf = self._shelf
        lent = sum(slot.mapping.nbytes for slot in shelf if slot.state == LENT)
        return ArenaStatistics(len(shelf), shelf.nbytes, lent, shelf.peak_nbytes, shelf.created, self._copied_nbytes)

    def close(self) -> None:
        """Forget all slots. What was sent stays valid in the training process; tensors kept here stay valid too."""
        self._rooms.finish()
        self._shelf.close()


def _pickle(obj: Any) -> Pickling:
    try:
        return pickled(obj, ReferencePickler)
    except Exception as error:  # noqa: BLE001 - reported below, unless the other pickler knows better
        failure = error
    try:
        return pickled(obj, MixedPickler)
    except Exception:  # noqa: BLE001 - the first error is the one that an ordinary pickling gives
        path = explain_unpicklable(obj, "batch", lambda part: pickled(part, MixedPickler))
    raise NotPicklableError(
        f"{path} cannot be sent to the training process: {failure}. "
        "Return tensors, arrays, numbers, strings and containers of them from the dataset or collate_fn."
    ) from failure
