"""A builder, pickled once for many workers: its arrays lie once in memory, however many workers look at them."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from typing import Any, NamedTuple, Self

import numpy as np

from feedline.errors import NotPicklableError
from feedline.transport.explain import explain_unpicklable
from feedline.transport.files import reduce_file
from feedline.transport.inherited import refuse_shared
from feedline.transport.memory import (
    Mapping,
    Piece,
    attach_private,
    equal_memory,
    has_anonymous_files,
    sealed_file,
)
from feedline.transport.pages import PAGE_NBYTES, doubtful
from feedline.transport.parcel import GRAIN, INLINE_NBYTES, Parcel, Span
from feedline.transport.picklers import Pickling, ValuePickler, find_definition
from feedline.transport.remap import LARGE_NBYTES, Owner, owner_of, remap
from feedline.transport.rooms import aligned
from feedline.transport.slots import SlotMemoryError
from feedline.transport.wire import Contents, Placed


class Stretch(NamedTuple):
    """Bytes of the file."""

    offset: int
    nbytes: int


class Frozen:
    """A builder as bytes: a skeleton, and one read-only anonymous file with the memory of its arrays and tensors.

    `fd` is None where there is nothing to share, or the system has no anonymous files. A context manager: leaving it
    closes the descriptor, and workers that have thawed the builder keep its memory.
    """

    def __init__(self, outline: bytes, stretches: list[Stretch], fd: int | None, nbytes: int) -> None:
        self._outline, self._stretches = outline, stretches
        self.fd = fd
        self.nbytes = nbytes

    @property
    def skeleton(self) -> bytes:
        """The builder without the memory in the file; says where in the file that is."""
        return pickle.dumps((self.nbytes, [offset for offset, _ in self._stretches]), 5) + self._outline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def matches(self, other: object) -> bool:
        """Whether `other`, a builder or a frozen one, would thaw to the very same: every byte is compared."""
        if isinstance(other, Frozen):
            theirs = other._map()
            pieces = [] if theirs is None else [Piece(o, theirs.address + o, n) for o, n in other._stretches]
            return self._outline == other._outline and self._holds(pieces)
        plan = _plan(other, "builder")
        return self._outline == plan.outline and self._holds(plan.pieces)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
        self.fd = None

    def _holds(self, pieces: list[Piece]) -> bool:
        """Whether they are what the file holds, wherever they would be placed in another."""
        if self.fd is None or len(pieces) != len(self._stretches):
            return not (self._stretches or pieces)
        mine = attach_private(self.fd, self.nbytes)
        placed = (piece._replace(offset=at.offset) for at, piece in zip(self._stretches, pieces, strict=True))
        return all(equal_memory(mine.address + p.offset, p.address, p.nbytes) for p in doubtful(self.fd, placed))

    def _map(self) -> Mapping | None:
        return None if self.fd is None else attach_private(self.fd, self.nbytes)


def freeze(obj: object, name: str = "builder") -> Frozen:
    """`obj` for many workers.

    Lambdas, closures and what `__main__` defines travel by value; arrays and tensors from 16 KiB on lie in the
    anonymous file; arrays that are mapped from a file are mapped again by each worker. Where it is safe (see
    `feedline.transport.remap`), large arrays of `obj` itself lie in the anonymous file from now on. Raises
    NotPicklableError, with the path below `name`, for what cannot be pickled.
    """
    owners: list[Owner] = []
    plan = _plan(obj, name, owners)
    if not plan.pieces:
        return Frozen(plan.outline, [], None, 0)
    try:
        fd = sealed_file(plan.nbytes, plan.pieces)
    except OSError as error:
        raise SlotMemoryError(
            f"{plan.nbytes} bytes of shared memory for the arrays of the {name} could not be had: {error.strerror}. "
            "Map them from a file (numpy.memmap), or allow the process more memory."
        ) from error
    remap(fd, plan.pieces, owners)
    return Frozen(plan.outline, [Stretch(piece.offset, piece.nbytes) for piece in plan.pieces], fd, plan.nbytes)


def thaw(fd: int | None, skeleton: bytes) -> Any:
    """The builder that was frozen. Its arrays are writable; a worker that writes gets its own copy of those pages.

    The descriptor may be closed afterwards. Classes and functions of the user's `__main__` become attributes of this
    process's `__main__`, so that their instances can be pickled by reference on the way back.
    """
    stream = io.BytesIO(skeleton)
    nbytes, offsets = pickle.load(stream)
    contents = Contents.decode(pickle.load(stream))
    memory = np.empty(0, np.uint8) if fd is None else np.asarray(attach_private(fd, nbytes))
    regions = {number: memory[offset - offset % GRAIN :] for number, offset in enumerate(offsets)}
    unpickler = pickle.Unpickler(stream, buffers=contents.build(regions))
    obj = unpickler.load()
    while definitions := unpickler.load():
        for name, definition in definitions.items():
            _define(name, definition)
    return obj


def _define(name: str, definition: types.FunctionType | type) -> None:
    definition.__qualname__ = name  # cloudpickle forgets in which class a class was defined
    if "." not in name:
        vars(sys.modules["__main__"]).setdefault(name, definition)


class _Plan(NamedTuple):
    outline: bytes  # the same wherever the pieces lie
    pieces: list[Piece]
    nbytes: int
    parcel: Parcel  # keeps the memory of the pieces alive


def _plan(obj: object, name: str, owners: list[Owner] | None = None) -> _Plan:
    """`owners`, if given, is extended by those of the memory that is met."""
    try:
        stream, parcel = _pickled(obj, owners)
    except Exception as error:
        raise NotPicklableError(
            f"{explain_unpicklable(obj, name, _pickled)} cannot be sent to a worker process: {error}. Create it lazily "
            "in the worker (on first use in __getitem__), leave it out in __getstate__, or use worker_method='thread'."
        ) from error
    layout = parcel.layout(lambda _: False)
    regions: list[Placed | bytearray] = []
    pieces: list[Piece] = []
    end = 0
    for span in layout.regions:
        nbytes = span.stop - span.start
        if nbytes < INLINE_NBYTES or not has_anonymous_files():
            regions.append(span.copy())
        else:
            regions.append(Placed(len(pieces), 0, span.pad + nbytes))
            pieces.append(Piece(_place(end, span) + span.pad, span.start, nbytes))
            end = aligned(pieces[-1].offset + nbytes)
    contents = Contents(regions, layout.places, parcel.views).encode()
    return _Plan(pickle.dumps(contents, 5) + stream, pieces, end, parcel)


def _place(end: int, span: Span) -> int:
    """Where in the file its region begins: for a large one, as far from the beginning of a page as it is in memory."""
    large = span.stop - span.start >= LARGE_NBYTES
    return end + (span.start - span.pad - end) % PAGE_NBYTES if large else end


def _pickled(obj: object, owners: list[Owner] | None = None) -> Pickling:
    """The object, then, in one dict after another up to an empty one, what it needs of `__main__`."""
    parcel = Parcel()
    stream = io.BytesIO()
    pickler = _BuilderPickler(stream, parcel, [] if owners is None else owners)
    pickler.dump(obj)
    while definitions := pickler.take_definitions():
        pickler.dump(definitions)
    pickler.dump({})
    return stream.getvalue(), parcel


class _BuilderPickler(ValuePickler):
    """Notes what of `__main__` and whose memory it meets; maps files again; refuses what only inheritance can share."""

    def __init__(self, file: io.BytesIO, parcel: Parcel, owners: list[Owner]) -> None:
        super().__init__(file, parcel)
        self._owners = owners
        self._met: dict[str, object] = {}
        self._taken: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray) and (reduced := reduce_file(obj)) is not None:
            return reduced
        refuse_shared(obj)
        if (owner := owner_of(obj)) is not None:
            self._owners.append(owner)
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            self._meet(obj)
        return super().reducer_override(obj)

    def take_definitions(self) -> dict[str, object]:
        """What was met since the last call."""
        new = {name: value for name, value in self._met.items() if name not in self._taken}
        self._taken.update(new)
        return new

    def _meet(self, obj: types.FunctionType | type) -> None:
        """Note the definition, and the class that it is part of, if they can be reached by name."""
        name = obj.__qualname__
        for reached in {name.partition(".")[0], name} if "<locals>" not in name else ():
            definition = find_definition("__main__", reached)
            if isinstance(definition, (type, types.FunctionType)) and definition.__module__ == "__main__":
                self._met[reached] = definition
