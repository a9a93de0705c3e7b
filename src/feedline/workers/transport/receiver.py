"""Receiving side of the transport: batches whose memory is the worker's slots."""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from feedline.core.descriptors import Descriptors
from feedline.errors import WorkerError
from feedline.workers.transport.forks import forks
from feedline.workers.transport.memory import Mapping, attach
from feedline.workers.transport.slots import FREE, RETIRED
from feedline.workers.transport.views import Bytes, base_array
from feedline.workers.transport.wire import Envelope, MessageContents, OpenedSlot, SlotRange


@dataclass(frozen=True, slots=True)
class InboxStatistics:
    """Memory of one worker that this process has mapped."""

    slots: int
    """Slots that this process has mapped."""
    nbytes: int
    """Bytes of all mapped slots."""
    lent_nbytes: int
    """Bytes of the slots that batches of this process still use."""
    peak_nbytes: int
    """Maximum of `nbytes` so far."""


class Inbox:
    """Decoder of one worker's messages; needs all of them, in order.

    Not thread-safe. `register(address, nbytes)` is called once for every newly mapped slot, `unregister(address)` once
    before it is unmapped, in the thread that drops the last view of it.
    """

    def __init__(
        self,
        register: Callable[[int, int], object] | None = None,
        unregister: Callable[[int], object] | None = None,
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._slots: dict[int, _LentSlot] = {}
        self._peak_nbytes = 0
        self.latest: list[weakref.ref[Bytes]] = []
        """Slots of the latest message, for `forks.add_delivered`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def loads(self, payload: bytes, fds: Iterable[int] = ()) -> Any:
        """Decode a message. Large tensors and arrays are writable views into slots.

        The worker reuses a slot only when its last view has been dropped, in any thread. Closes `fds`. If unpickling
        raises, the slots are freed. Raises WorkerError if descriptors were lost because too many files are open.
        """
        contents, stream = self._open(payload, fds)
        leases = self._leases(contents)
        self.latest = [weakref.ref(memory) for memory in leases.values()]
        return pickle.loads(stream, buffers=contents.build(leases))

    def discard(self, payload: bytes, fds: Iterable[int] = ()) -> None:
        """Skip a message and free its slots; closes `fds`."""
        contents, _ = self._open(payload, fds)
        self._leases(contents)

    def statistics(self) -> InboxStatistics:
        slots = list(self._slots.values())
        lent = sum(slot.mapping.nbytes for slot in slots if slot.lent)
        return InboxStatistics(len(slots), sum(slot.mapping.nbytes for slot in slots), lent, self._peak_nbytes)

    def close(self) -> None:
        """Drop all slots; batches in use keep their mappings."""
        self._slots.clear()

    def _open(self, payload: bytes, fds: Iterable[int]) -> tuple[MessageContents, memoryview]:
        envelope: Envelope = pickle.loads(payload)
        # A mapping needs no descriptor: a process that keeps many batches would run out of them.
        with fds if isinstance(fds, Descriptors) else Descriptors(fds) as owned:
            self._attach(envelope.opened, owned)
        for number in envelope.closed:
            # Batches that use it still hold the mapping, and unmap it with the last of them.
            self._slots.pop(number, None)
        data = self._body(envelope.body)
        return MessageContents.decode(data[: envelope.contents_nbytes]), data[envelope.contents_nbytes :]

    def _body(self, body: bytes | SlotRange) -> memoryview:
        return body.view_in(self._slots[body.number].lease()).data if isinstance(body, SlotRange) else memoryview(body)

    def _leases(self, contents: MessageContents) -> dict[int, Bytes]:
        return {number: self._slots[number].lease() for number in contents.slots}

    def _attach(self, opened: Sequence[OpenedSlot], fds: Descriptors) -> None:
        expected = sum(slot.name is None for slot in opened)
        if len(fds) != expected:
            raise WorkerError(
                f"A batch came with {len(fds)} file descriptors instead of {expected}: "
                "this process has too many open files. Raise the limit (ulimit -n)."
            )
        descriptors = iter(fds)
        for slot in opened:
            mapping = attach(next(descriptors) if slot.name is None else slot.name, slot.nbytes)
            self._slots[slot.number] = _LentSlot(mapping)
            if self._register is not None:
                self._register(mapping.address, mapping.nbytes)
                mapping.on_unmap = self._unregister
        self._peak_nbytes = max(self._peak_nbytes, sum(slot.mapping.nbytes for slot in self._slots.values()))


class _LentSlot:
    """A worker's slot, as mapped by the training process."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self._memory = np.asarray(mapping).data
        self._watch: weakref.ref[Bytes] | None = None

    @property
    def lent(self) -> bool:
        return self._watch is not None and self._watch() is not None

    def lease(self) -> Bytes:
        """Array of the slot's bytes; dropping its last view frees the slot."""
        memory = base_array(self._memory)
        self._watch = weakref.ref(memory, _Release(self._memory))
        return memory


class _Release:
    """Callback that frees a slot when its last view is dropped."""

    # Runs in any thread, also inside the garbage collector, so it takes no lock. A forked child must free nothing: the
    # slot belongs to its parent. The memory that the child inherited must not change either, so a slot that was lent
    # during a fork is retired instead of reused.

    __slots__ = ("_forks", "_header", "_pid")

    def __init__(self, header: memoryview) -> None:
        self._header = header
        self._pid = os.getpid()
        self._forks = forks.count

    def __call__(self, _: object) -> None:
        if os.getpid() == self._pid:
            self._header[0] = FREE if self._forks == forks.count else RETIRED
