"""A builder, pickled once for many workers: its arrays lie once in memory, however many workers look at them."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from feedline.errors import NotPicklableError
from feedline.workers.transport.explain import explain_unpicklable
from feedline.workers.transport.memory import (
    Mapping,
    MemoryPiece,
    attach_private,
    equal_memory,
    has_anonymous_files,
    sealed_file,
)
from feedline.workers.transport.pickling import (
    GRAIN,
    INLINE_NBYTES,
    OutOfBandPickle,
    Pickling,
    ValuePickler,
    find_definition,
    reduce_file,
    refuse_shared,
)
from feedline.workers.transport.sharing import SharedFile, file_at, no_memory, reduce_shared
from feedline.workers.transport.slots import aligned
from feedline.workers.transport.wire import MessageContents, SlotRange

_MOST_SHARED = 240
"""Files of `feedline.share` in one builder: a message of the kernel's carries 253 descriptors, and some are taken."""


class Stretch(NamedTuple):
    """Bytes of the file."""

    offset: int
    nbytes: int


class SharedBuilder:
    """A builder as bytes: a skeleton, and one read-only anonymous file with the memory of its arrays and tensors.

    `fd` is None where there is nothing to share, or the system has no anonymous files. Memory of `feedline.share` stays
    in its own files. A context manager: leaving it closes the descriptor, and workers that have thawed the builder keep
    its memory.
    """

    def __init__(
        self, outline: bytes, stretches: list[Stretch], fd: int | None, nbytes: int, shared: list[SharedFile]
    ) -> None:
        self._outline, self._stretches, self._shared = outline, stretches, shared
        self.fd = fd
        self.nbytes = nbytes

    @property
    def fds(self) -> list[int]:
        """The descriptors that `thaw` needs; they stay this object's."""
        return [*([] if self.fd is None else [self.fd]), *(file.fd for file in self._shared)]

    @property
    def skeleton(self) -> bytes:
        """The builder without the memory in the files; says where in the files that is."""
        places = self.nbytes, [offset for offset, _ in self._stretches], [file.nbytes for file in self._shared]
        return pickle.dumps(places, 5) + self._outline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def matches(self, other: object) -> bool:
        """Whether `other`, a builder or a frozen one, would thaw to the very same: every byte is compared."""
        if isinstance(other, SharedBuilder):
            theirs = other._map()
            pieces = [] if theirs is None else [MemoryPiece(o, theirs.address + o, n) for o, n in other._stretches]
            return self._outline == other._outline and self._holds(pieces)
        plan = _plan(other, "builder")
        return self._outline == plan.outline and self._holds(plan.pieces)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
        self.fd, self._shared = None, []

    def _holds(self, pieces: list[MemoryPiece]) -> bool:
        """Whether they are what the file holds, wherever they would be placed in another."""
        if self.fd is None or len(pieces) != len(self._stretches):
            return not (self._stretches or pieces)
        mine = attach_private(self.fd, self.nbytes)
        placed = (piece._replace(offset=at.offset) for at, piece in zip(self._stretches, pieces, strict=True))
        return all(equal_memory(mine.address + p.offset, p.address, p.nbytes) for p in placed)

    def _map(self) -> Mapping | None:
        return None if self.fd is None else attach_private(self.fd, self.nbytes)


def dump_builder(obj: object, name: str = "builder") -> SharedBuilder:
    """`obj` for many workers.

    Lambdas, closures and what `__main__` defines travel by value; arrays and tensors from 16 KiB on lie in the
    anonymous file; arrays that are mapped from a file are mapped again by each worker, those of `feedline.share` from
    theirs. Raises NotPicklableError, with the path below `name`, for what cannot be pickled.
    """
    plan = _plan(obj, name)
    if len(plan.shared) > _MOST_SHARED:
        raise NotPicklableError(
            f"the {name} holds {len(plan.shared)} arrays of feedline.share, and a worker process can be sent "
            f"{_MOST_SHARED} of them. Share one large array and take views of it"
        )
    if not plan.pieces:
        return SharedBuilder(plan.outline, [], None, 0, plan.shared)
    try:
        fd = sealed_file(plan.nbytes, plan.pieces)
    except OSError as error:
        raise no_memory(plan.nbytes, f"the arrays of the {name}", error) from error
    stretches = [Stretch(piece.offset, piece.nbytes) for piece in plan.pieces]
    return SharedBuilder(plan.outline, stretches, fd, plan.nbytes, plan.shared)


def load_builder(fds: Sequence[int], skeleton: bytes) -> Any:
    """The builder that was frozen, from `Frozen.fds`.

    Its arrays are writable; a worker that writes gets its own copy of those pages, but for arrays of `feedline.share`.
    The descriptors may be closed afterwards. Classes and functions of the user's `__main__` become attributes of this
    process's `__main__`, so that their instances can be pickled by reference on the way back.
    """
    stream = io.BytesIO(skeleton)
    nbytes, offsets, shared_nbytes = pickle.load(stream)
    contents = MessageContents.decode(pickle.load(stream)[0])
    memory = np.asarray(attach_private(fds[0], nbytes)) if offsets else np.empty(0, np.uint8)
    regions = {number: memory[offset - offset % GRAIN :] for number, offset in enumerate(offsets)}
    shared_fds = fds[1:] if offsets else fds
    for number, (fd, size) in enumerate(zip(shared_fds, shared_nbytes, strict=True)):
        regions[~number] = np.asarray(SharedFile(os.dup(fd), size))
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


class _PicklePlan(NamedTuple):
    outline: bytes  # the same wherever the pieces lie
    pieces: list[MemoryPiece]
    nbytes: int
    parcel: OutOfBandPickle  # keeps the memory of the pieces alive
    shared: list[SharedFile]


def _plan(obj: object, name: str) -> _PicklePlan:
    try:
        stream, parcel = _pickled(obj)
    except Exception as error:
        raise NotPicklableError(
            f"{explain_unpicklable(obj, name, _pickled)} cannot be sent to a worker process: {error}. Create it lazily "
            "in the worker (on first use in __getitem__), leave it out in __getstate__, or use worker_method='thread'."
        ) from error
    layout = parcel.layout(lambda span: file_at(span.start) is not None)
    regions: list[SlotRange | bytearray] = []
    pieces: list[MemoryPiece] = []
    shared: dict[SharedFile, int] = {}
    end = 0
    for span in layout.regions:
        nbytes = span.stop - span.start
        if (file := file_at(span.start)) is not None:
            number = shared.setdefault(file, len(shared))
            # Negative numbers are those of shared files: pieces are counted from 0.
            regions.append(SlotRange(~number, span.start - span.pad - file.address, span.pad + nbytes))
        elif nbytes < INLINE_NBYTES or not has_anonymous_files():
            regions.append(span.copy())
        else:
            regions.append(SlotRange(len(pieces), 0, span.pad + nbytes))
            pieces.append(MemoryPiece(end + span.pad, span.start, nbytes))
            end = aligned(pieces[-1].offset + nbytes)
    contents = MessageContents(regions, layout.places, parcel.views).encode()
    # With the files' identities: a builder over another shared file is another one, though the bytes be the same.
    head = pickle.dumps((contents, [file.identity for file in shared]), 5)
    return _PicklePlan(head + stream, pieces, end, parcel, list(shared))


def _pickled(obj: object) -> Pickling:
    """The object, then, in one dict after another up to an empty one, what it needs of `__main__`."""
    parcel = OutOfBandPickle()
    stream = io.BytesIO()
    pickler = _BuilderPickler(stream, parcel)
    pickler.dump(obj)
    while definitions := pickler.take_definitions():
        pickler.dump(definitions)
    pickler.dump({})
    return stream.getvalue(), parcel


class _BuilderPickler(ValuePickler):
    """Notes what of `__main__` it meets; maps files again; refuses what only inheritance can share."""

    def __init__(self, file: io.BytesIO, parcel: OutOfBandPickle) -> None:
        super().__init__(file, parcel)
        self._met: dict[str, object] = {}
        self._taken: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and (reduced := reduce_shared(obj)) is not None:
            return reduced
        if isinstance(obj, np.ndarray) and (reduced := reduce_file(obj)) is not None:
            return reduced
        refuse_shared(obj)
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
