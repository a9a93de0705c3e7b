"""What a message says, the same for the worker that writes it and the process that reads it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from feedline.workers.transport.pickling import ViewPlace
from feedline.workers.transport.views import ArrayView, BufferView, Bytes, Region, StorageView, TensorView, View

if TYPE_CHECKING:
    from collections.abc import Mapping


class OpenedSlot(NamedTuple):
    """A slot that the message uses for the first time; without a name its descriptor travels with the message."""

    number: int
    nbytes: int
    name: str | None


class SlotRange(NamedTuple):
    """Bytes that lie in a slot, from `start`, counted from the slot's beginning."""

    number: int
    start: int
    nbytes: int

    def within(self, slot: Bytes) -> Bytes:
        return slot[self.start : self.start + self.nbytes]


_KINDS = (TensorView, ArrayView, StorageView, BufferView)


_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


class MessageContents(NamedTuple):
    """Where the memory of the pickled object is, and what it is."""

    regions: list[SlotRange | bytearray]
    places: list[ViewPlace]
    views: list[View]

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        regions, places, views = pickle.loads(data)
        return cls(
            [SlotRange(*region) if type(region) is tuple else region for region in regions],
            [ViewPlace(*place) for place in places],
            [_KINDS[kind](*fields) for kind, fields in views],
        )

    def encode(self) -> bytes:
        """As a pickle of plain tuples: naming the class of each would cost more than all that is in them."""
        regions = [tuple(region) if isinstance(region, SlotRange) else region for region in self.regions]
        views = [(_KIND_NUMBERS[type(view)], tuple(view)) for view in self.views]
        return pickle.dumps((regions, [tuple(place) for place in self.places], views), 5)

    @property
    def slots(self) -> set[int]:
        """The numbers of the slots that it needs."""
        return {region.number for region in self.regions if isinstance(region, SlotRange)}

    def build(self, slots: Mapping[int, Bytes]) -> list[Any]:
        """What the marks in the stream stand for, over the memory of the slots: the `buffers` for unpickling.

        NEXT_BUFFER pushes whatever comes next in `buffers`; nothing requires it to be a buffer.
        """
        regions = [
            Region(part.within(slots[part.number]) if isinstance(part, SlotRange) else np.frombuffer(part, np.uint8))
            for part in self.regions
        ]
        return [view.build(regions[at.region], at.offset) for view, at in zip(self.views, self.places, strict=True)]


class Envelope(NamedTuple):
    """The payload. The body is pickled `MessageContents` of `contents_nbytes`, then the pickled object itself."""

    opened: list[OpenedSlot]
    closed: list[int]
    contents_nbytes: int
    body: bytes | SlotRange
