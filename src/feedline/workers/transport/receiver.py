"""The training process's side of the transport: batches whose memory is the worker's slots."""

from __future__ import annotations

import os
import pickle
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from feedline.errors import WorkerError
from feedline.workers.transport.memory import attach
from feedline.workers.transport.slots import FREE, RETIRED
from feedline.workers.transport.views import watchable
from feedline.workers.transport.wire import Envelope, MessageContents, OpenedSlot, SlotRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from feedline.workers.transport.memory import Mapping
    from feedline.workers.transport.views import Bytes


@dataclass(frozen=True, slots=True)
class InboxStatistics:
    """What this process has mapped of one worker's memory."""

    slots: int
    """Slots that are mapped."""
    nbytes: int
    """Bytes of all mapped slots."""
    lent_nbytes: int
    """Bytes of the slots that batches of this process still look at."""
    peak_nbytes: int
    """The most that `nbytes` ever was."""


class Inbox:
    """Reads the messages of one worker, all of them and in their order, from one thread at a time.

    `register(address, nbytes)` is called once for every newly mapped slot, `unregister(address)` once before it is
    unmapped, in whichever thread drops the last view of it.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def loads(self, payload: bytes, fds: Sequence[int] = ()) -> Any:
        """The object that was sent. Its large tensors and arrays, all writable, are views into slots.

        When the last view of a slot is gone, in whatever thread, the worker uses it again; until then nobody writes to
        it. The descriptors are closed. What unpickling raises is raised here, and frees the slots.
        """
        contents, stream = self._open(payload, fds)
        return pickle.loads(stream, buffers=contents.build(self._leases(contents)))

    def discard(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Take a message that nobody wants any more, and free its slots."""
        contents, _ = self._open(payload, fds)
        self._leases(contents)

    def statistics(self) -> InboxStatistics:
        slots = list(self._slots.values())
        lent = sum(slot.mapping.nbytes for slot in slots if slot.lent)
        return InboxStatistics(len(slots), sum(slot.mapping.nbytes for slot in slots), lent, self._peak_nbytes)

    def close(self) -> None:
        """Forget all slots; what the user still holds stays valid, and is unmapped when it is dropped."""
        self._slots.clear()

    def _open(self, payload: bytes, fds: Sequence[int]) -> tuple[MessageContents, memoryview]:
        envelope: Envelope = pickle.loads(payload)
        self._attach(envelope.opened, fds)
        for number in envelope.closed:
            self._slots.pop(number, None)
        data = self._body(envelope.body)
        return MessageContents.decode(data[: envelope.contents_nbytes]), data[envelope.contents_nbytes :]

    def _body(self, body: bytes | SlotRange) -> memoryview:
        return body.within(self._slots[body.number].lease()).data if isinstance(body, SlotRange) else memoryview(body)

    def _leases(self, contents: MessageContents) -> dict[int, Bytes]:
        return {number: self._slots[number].lease() for number in contents.slots}

    def _attach(self, opened: Sequence[OpenedSlot], fds: Sequence[int]) -> None:
        try:
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
        finally:
            for fd in fds:
                os.close(fd)
        self._peak_nbytes = max(self._peak_nbytes, sum(slot.mapping.nbytes for slot in self._slots.values()))


class _LentSlot:
    """A worker's slot, seen from the training process."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self._memory = np.asarray(mapping).data
        self._watch: weakref.ref[Bytes] | None = None

    @property
    def lent(self) -> bool:
        return self._watch is not None and self._watch() is not None

    def lease(self) -> Bytes:
        """The slot's bytes; the slot is the worker's again when this array and all views of it are gone."""
        memory = watchable(self._memory)
        self._watch = weakref.ref(memory, _Release(self._memory))
        return memory


class _Release:
    """Frees a slot when the last view of it dies: in any thread, inside the garbage collector, without a lock.

    A forked child of the training process frees nothing. What it inherited must not change under its eyes either, so
    a slot that was lent while the process forked is retired instead of reused.
    """

    __slots__ = ("_forks", "_header", "_pid")

    def __init__(self, header: memoryview) -> None:
        self._header = header
        self._pid = os.getpid()
        self._forks = _forks.count

    def __call__(self, _: object) -> None:
        if os.getpid() == self._pid:
            self._header[0] = FREE if self._forks == _forks.count else RETIRED


class _Forks:
    """Counts the forks of this process, a fact of the whole process."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


_forks = _Forks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_forks.add)
