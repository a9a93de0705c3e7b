"""Batches in Ray's object store: encoded by an actor, read in place."""

from __future__ import annotations

import ctypes
import pickle
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from feedline.core.tensors import Allocator
from feedline.workers.transport.pickling import GRAIN, INLINE_NBYTES, AddressRange, OutOfBandPickle
from feedline.workers.transport.sender import pickle_batch
from feedline.workers.transport.wire import MessageContents, SlotRange

if TYPE_CHECKING:
    from feedline.workers.transport.views import Bytes

COPIED_NBYTES = 256 * 1024
"""Size in bytes below which a batch is copied: Ray sends it inside its messages, or a copy is cheaper."""

LENT_SHARE = 0.3
"""Share of the node's object store that delivered batches may hold; further batches are copied out of the store."""


class EncodedBatch(NamedTuple):
    """Parts of a batch that Ray stores as one object."""

    contents: bytes
    stream: bytes
    regions: list[Bytes]
    """Memory of the batch; Ray copies it into the object store."""


def encode(value: Any) -> tuple[EncodedBatch, OutOfBandPickle]:
    """Encode a value; the regions may be views of its memory.

    The caller keeps the second result until Ray has copied the regions. Raises NotPicklableError with the path of the
    part that cannot be pickled.
    """
    stream, oob = pickle_batch(value)
    layout = oob.layout(lambda _: False, as_torch=True)
    regions: list[Bytes] = []
    places: list[SlotRange | bytearray] = []
    for span in layout.regions:
        nbytes = span.stop - span.start
        if nbytes < INLINE_NBYTES:
            places.append(span.copy())
            continue
        places.append(SlotRange(len(regions), 0, nbytes + span.pad))
        regions.append(_bytes_of(span))
    contents = MessageContents(places, layout.places, oob.views).encode()
    return EncodedBatch(contents, stream, regions), oob


def _bytes_of(span: AddressRange) -> Bytes:
    """Bytes of a span, from the preceding multiple of `GRAIN` on.

    A view if the span begins at a multiple, else a copy.
    """
    if span.start % GRAIN:
        return np.frombuffer(span.copy(), np.uint8)
    memory = memoryview((ctypes.c_ubyte * (span.stop - span.start)).from_address(span.start))
    return np.frombuffer(memory, np.uint8)


class StoredBatches:
    """Decoder of batches that stay in the object store.

    Only the decoded batch can reach its object: the pool drops the only reference once it is read. So the batch may be
    written to, as one of any other pool. Dropping its last view frees the object. Batches that together hold more than
    `LENT_SHARE` of the store's `capacity` bytes are copied into memory of `allocate` instead.
    """

    def __init__(self, capacity: float, allocate: Allocator) -> None:
        self._limit, self._allocate = LENT_SHARE * capacity, allocate
        self._lent_nbytes = 0
        self._freed: deque[int] = deque()
        self.copied = 0
        """Batches that were copied out of the store."""

    @property
    def lent_nbytes(self) -> int:
        """Bytes of the object store that batches of the loop hold."""
        while self._freed:
            self._lent_nbytes -= self._freed.popleft()
        return self._lent_nbytes

    def decode(self, encoded: EncodedBatch) -> Any:
        """Decode a batch; its tensors and arrays are writable."""
        nbytes = sum(len(region) for region in encoded.regions)
        if nbytes < COPIED_NBYTES or self.lent_nbytes + nbytes > self._limit:
            self.copied += nbytes >= COPIED_NBYTES
            leases = {number: self._copy(region) for number, region in enumerate(encoded.regions)}
        else:
            leases = {number: self._lease(region) for number, region in enumerate(encoded.regions)}
        return pickle.loads(encoded.stream, buffers=MessageContents.decode(encoded.contents).build(leases))

    def _copy(self, region: Bytes) -> Bytes:
        copy: Bytes = self._allocate((len(region),), torch.uint8).numpy()
        copy[:] = region
        return copy

    def _lease(self, region: Bytes) -> Bytes:
        stored = _StoredRegion(region)
        self._lent_nbytes += len(region)
        # A finalizer may run in any thread: it takes no lock and changes no sum.
        weakref.finalize(stored, self._freed.append, len(region)).atexit = False
        return np.asarray(stored)


class _StoredRegion:
    """Writable bytes of an object that has no other reader."""

    def __init__(self, region: Bytes) -> None:
        self._region = region  # keeps Ray's buffer, and with it the object
        address, _ = region.__array_interface__["data"]
        self.__array_interface__ = {"data": (address, False), "shape": region.shape, "typestr": "|u1", "version": 3}
