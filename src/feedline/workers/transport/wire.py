"""Message format, shared by the worker and the training process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from feedline.workers.transport.pickling import ViewPlace
from feedline.workers.transport.views import ArrayView, BufferView, Bytes, Region, StorageView, TensorView, View


class OpenedSlot(NamedTuple):
    """Slot that a message uses for the first time.

    Without a name, its descriptor comes with the message.
    """

    number: int
    nbytes: int
    name: str | None


class SlotRange(NamedTuple):
    """Bytes of a slot; `start` counts from its beginning, header included."""

    number: int
    start: int
    nbytes: int

    def view_in(self, slot: Bytes) -> Bytes:
        return slot[self.start : self.start + self.nbytes]


_KINDS = (TensorView, ArrayView, StorageView, BufferView)


_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


class MessageContents(NamedTuple):
    """Regions of memory of a pickled object, and the views over them."""

    regions: list[SlotRange | bytearray]
    places: list[ViewPlace]
    views: list[View]

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        regions, places, views = pickle.loads(data)  # plain tuples: see `encode`
        return cls(
            [SlotRange(*region) if type(region) is tuple else region for region in regions],
            [ViewPlace(*place) for place in places],
            [_KINDS[kind](*fields) for kind, fields in views],
        )

    def encode(self) -> bytes:
        """Pickle as plain tuples: class names would exceed the values."""
        regions = [tuple(region) if isinstance(region, SlotRange) else region for region in self.regions]
        views = [(_KIND_NUMBERS[type(view)], tuple(view)) for view in self.views]
        return pickle.dumps((regions, [tuple(place) for place in self.places], views), 5)

    @property
    def slots(self) -> set[int]:
        """Numbers of the slots that hold the regions."""
        return {region.number for region in self.regions if isinstance(region, SlotRange)}

    def build(self, slots: Mapping[int, Bytes]) -> list[Any]:
        """Build the objects that replace the marks, as `buffers` for unpickling.

        The opcode NEXT_BUFFER pushes the next item of `buffers`, which need not be a buffer.
        """
        regions = [
            Region(part.view_in(slots[part.number]) if isinstance(part, SlotRange) else np.frombuffer(part, np.uint8))
            for part in self.regions
        ]
        return [view.build(regions[at.region], at.offset) for view, at in zip(self.views, self.places, strict=True)]


class Envelope(NamedTuple):
    """Payload of a message.

    The body is pickled `MessageContents` of `contents_nbytes` bytes, then the pickled object.
    """

    opened: list[OpenedSlot]
    closed: list[int]
    contents_nbytes: int
    body: bytes | SlotRange
