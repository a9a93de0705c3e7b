"""One batch on its way out of a worker: what is copied into slots, what lies there already, what goes along."""

from __future__ import annotations

import ctypes
import os
import pickle
from typing import TYPE_CHECKING, NamedTuple

from feedline.transport.parcel import INLINE_NBYTES
from feedline.transport.rooms import ALONE_NBYTES, aligned
from feedline.transport.slots import FREE
from feedline.transport.wire import Envelope, Opened, Placed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from feedline.transport.parcel import Span
    from feedline.transport.rooms import Room, Rooms
    from feedline.transport.slots import Shelf, Slot
    from feedline.transport.views import Bytes

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


class Shipment:
    """One message in the making: nothing is lent until it is complete."""

    def __init__(self, shelf: Shelf, rooms: Rooms) -> None:
        self._shelf = shelf
        self._rooms = rooms
        self._used: dict[int, Slot] = {}
        self._held: list[Bytes] = []
        self.copied_nbytes = 0

    def place(self, regions: Sequence[Span]) -> list[Placed | bytearray]:
        """Every region as bytes, where they lie already, or where they are copied to."""
        placed: dict[int, Placed | bytearray] = {}
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
        place: bytes | Placed = body
        if len(body) > _BODY_NBYTES:
            place = self._fill(self._rooms.alone(len(body)), 0, body, len(body))
        opened = [(slot, self._shelf.hand_over(slot)) for slot in self._used.values() if slot.handle is not None]
        for slot in self._used.values():
            slot.lend()
        envelope = Envelope(
            [Opened(s.number, s.mapping.nbytes, handle if isinstance(handle, str) else None) for s, handle in opened],
            self._shelf.tick(),
            contents_nbytes,
            place,
        )
        return Message(pickle.dumps(envelope, 5), tuple(handle for _, handle in opened if isinstance(handle, int)))

    def _copy(self, spans: list[Span]) -> list[Placed]:
        large = [span for span in spans if span.stop - span.start >= ALONE_NBYTES]
        apart = set(large) if len(large) <= _APART_LIMIT else set()
        self._rooms.expect(sum(aligned(span.stop - span.start + span.pad) for span in spans if span not in apart))
        return [self._copy_one(span, span in apart) for span in spans]

    def _copy_one(self, span: Span, apart: bool) -> Placed:
        nbytes = span.stop - span.start + span.pad
        room = self._rooms.alone(nbytes) if apart else self._rooms.shared(nbytes)
        self.copied_nbytes += span.stop - span.start
        return self._fill(room, span.pad, span.start, span.stop - span.start)

    def _fill(self, room: Room, pad: int, source: int | bytes, nbytes: int) -> Placed:
        self._held.append(room.memory)
        ctypes.memmove(room.address + pad, source, nbytes)
        return self._use(room.slot, room.start, pad + nbytes)

    def _use(self, slot: Slot, start: int, nbytes: int) -> Placed:
        self._used[slot.number] = slot
        return Placed(slot.number, start, nbytes)
