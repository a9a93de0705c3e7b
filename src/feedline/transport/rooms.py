"""Room for new data in a worker's slots: large things get a slot of their own, small ones share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from feedline.transport.slots import HEADER_NBYTES

if TYPE_CHECKING:
    from feedline.transport.slots import Shelf, Slot
    from feedline.transport.views import Bytes

ALONE_NBYTES = 256 * 1024
"""From this size on, data has a slot of its own, so that its memory is free again as soon as it is dropped."""

_ALIGNMENT = 64


class Room(NamedTuple):
    """Bytes of a slot, from `start`. `memory` is the whole slot and keeps it from being used for anything else."""

    slot: Slot
    start: int
    memory: Bytes

    @property
    def address(self) -> int:
        return self.slot.mapping.address + self.start


class Rooms:
    """Hands out room, aligned to 64 bytes."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._common: Room | None = None
        self._packed_nbytes = 0
        self._expected_nbytes = 0

    def alone(self, nbytes: int) -> Room:
        """Room in a slot that holds nothing else."""
        slot = self._shelf.take(nbytes)
        return Room(slot, HEADER_NBYTES, slot.bytes())

    def shared(self, nbytes: int) -> Room:
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
