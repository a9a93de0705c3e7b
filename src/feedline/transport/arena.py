"""The worker's side of the transport: batches leave as small messages, their memory stays in slots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from feedline.errors import NotPicklableError
from feedline.transport.explain import explain_unpicklable
from feedline.transport.parcel import INLINE_NBYTES
from feedline.transport.picklers import MixedPickler, Pickling, ReferencePickler, pickled
from feedline.transport.rooms import ALONE_NBYTES, Rooms
from feedline.transport.shipment import UNSENT_LIMIT, Message, Shipment
from feedline.transport.slots import LENT, Shelf
from feedline.transport.views import tensor_over
from feedline.transport.wire import Contents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from feedline.transport.memory import Backing


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
        self._shelf = Shelf(backing)
        self._rooms = Rooms(self._shelf)
        self._copied_nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor that `dumps` sends without copying it, as it does all views of it.

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
        shipment = Shipment(self._shelf, self._rooms)
        try:
            regions = shipment.place(layout.regions)
            contents = Contents(regions, layout.places, parcel.views).encode()
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
