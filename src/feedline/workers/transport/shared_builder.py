"""Builders pickled once for many workers that share their arrays."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from feedline.core.descriptors import Descriptors, opened
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
    check_not_shared,
    find_definition,
    reduce_file,
)
from feedline.workers.transport.sharing import SharedFile, allocation_error, file_at, reduce_shared
from feedline.workers.transport.slots import align
from feedline.workers.transport.wire import MessageContents, SlotRange

_MOST_SHARED = 240
"""Highest number of files of `feedline.share` in one builder: a message carries at most 253 descriptors, and some have
other uses.
"""


_MAIN_MODULES = {"__main__", "__mp_main__"}
"""Names of the module of the user's script; multiprocessing uses the second one in processes that it spawns."""


class FileExtent(NamedTuple):
    """Offset and size of bytes in the file."""

    offset: int
    nbytes: int


class SharedBuilder:
    """Pickled builder: a skeleton, and a sealed file of array memory.

    `fd` is None if there is nothing to share, or the system has no anonymous files. Memory of `feedline.share` stays in
    its own files. A context manager: leaving it closes the descriptor; workers that have loaded the builder keep its
    memory.
    """

    def __init__(self, plan: _PicklePlan, extents: list[FileExtent], file: Descriptors | None) -> None:
        self._outline, self._extents, self._shared = plan.outline, extents, plan.shared
        self._file = file
        self.nbytes = 0 if file is None else plan.nbytes
        self.modules = plan.modules
        """Names of the modules that the builder refers to, and of those that define its classes and functions."""

    @property
    def fd(self) -> int | None:
        """Descriptor of the file of array memory; this object owns it."""
        return None if self._file is None else self._file.fd

    @property
    def fds(self) -> list[int]:
        """Descriptors for `load_builder`; this object still owns them."""
        return [*([] if self.fd is None else [self.fd]), *(file.fd for file in self._shared)]

    @property
    def skeleton(self) -> bytes:
        """Pickled builder with offsets in place of the files' memory."""
        places = self.nbytes, [offset for offset, _ in self._extents], [file.nbytes for file in self._shared]
        return pickle.dumps(places, 5) + self._outline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def matches(self, other: object) -> bool:
        """True if `other`, pickled or not, would load as the same builder.

        Compares every byte.
        """
        if isinstance(other, SharedBuilder):
            theirs = other._map()
            pieces = [] if theirs is None else [MemoryPiece(o, theirs.address + o, n) for o, n in other._extents]
            return self._outline == other._outline and self._contains(pieces)
        plan = _build_plan(other, "builder")
        return self._outline == plan.outline and self._contains(plan.pieces)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._shared = None, []

    def _contains(self, pieces: list[MemoryPiece]) -> bool:
        """True if the file holds exactly these pieces, at any offsets."""
        if self.fd is None or len(pieces) != len(self._extents):
            return not (self._extents or pieces)
        mine = attach_private(self.fd, self.nbytes)
        placed = (piece._replace(offset=at.offset) for at, piece in zip(self._extents, pieces, strict=True))
        return all(equal_memory(mine.address + p.offset, p.address, p.nbytes) for p in placed)

    def _map(self) -> Mapping | None:
        return None if self.fd is None else attach_private(self.fd, self.nbytes)


def dump_builder(obj: object, name: str = "builder") -> SharedBuilder:
    """Pickle `obj` for many workers.

    Lambdas, closures and definitions of `__main__` are pickled by value. Arrays and tensors of at least 16 KiB are put
    into the anonymous file. Each worker maps file-mapped arrays again, and those of `feedline.share`. Raises
    NotPicklableError with the path, below `name`, of the part that cannot be pickled, and SlotMemoryError if there is
    no memory for the file.
    """
    plan = _build_plan(obj, name)
    if len(plan.shared) > _MOST_SHARED:
        raise NotPicklableError(
            f"the {name} holds {len(plan.shared)} arrays of feedline.share, but a worker process can receive "
            f"only {_MOST_SHARED}. Share one large array and take views of it"
        )
    if not plan.pieces:
        return SharedBuilder(plan, [], None)
    try:
        file = sealed_file(plan.nbytes, plan.pieces)
    except OSError as error:
        raise allocation_error(plan.nbytes, f"the arrays of the {name}", error) from error
    extents = [FileExtent(piece.offset, piece.nbytes) for piece in plan.pieces]
    return SharedBuilder(plan, extents, file)


def load_builder(fds: Sequence[int], skeleton: bytes) -> Any:
    """Load a builder from `SharedBuilder.fds` and `SharedBuilder.skeleton`.

    Its arrays are writable: a worker that writes gets a copy of those pages, except for arrays of `feedline.share`. The
    caller may close the descriptors afterwards. Classes and functions of the user's `__main__` become attributes of
    this process's `__main__`, so that batches can pickle their instances by reference.
    """
    stream = io.BytesIO(skeleton)
    nbytes, offsets, shared_nbytes = pickle.load(stream)
    contents = MessageContents.decode(pickle.load(stream)[0])
    memory = np.asarray(attach_private(fds[0], nbytes)) if offsets else np.empty(0, np.uint8)
    regions = {number: memory[offset - offset % GRAIN :] for number, offset in enumerate(offsets)}
    shared_fds = fds[1:] if offsets else fds
    for number, (fd, size) in enumerate(zip(shared_fds, shared_nbytes, strict=True)):
        regions[~number] = np.asarray(SharedFile(opened(os.dup, fd), size))
    unpickler = pickle.Unpickler(stream, buffers=contents.build(regions))
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
    obj = unpickler.load()
    while definitions := unpickler.load():
        for name, definition in definitions.items():
            _define(name, definition)
    return obj


def _define(name: str, definition: types.FunctionType | type) -> None:
    definition.__qualname__ = name  # cloudpickle drops the enclosing class from the name
    if "." not in name:
        vars(sys.modules["__main__"]).setdefault(name, definition)


class _PicklePlan(NamedTuple):
    outline: bytes  # does not depend on the places of the pieces
    pieces: list[MemoryPiece]
    nbytes: int
    oob: OutOfBandPickle  # keeps the memory of the pieces alive
    shared: list[SharedFile]
    modules: frozenset[str]


def _build_plan(obj: object, name: str) -> _PicklePlan:
    try:
        modules: set[str] = set()
        stream, oob = _dump(obj, modules)
    except Exception as error:
        raise NotPicklableError(
            f"{explain_unpicklable(obj, name, _dump)} cannot be sent to a worker process: {error}. Create it lazily "
            "in the worker (on first use in __getitem__), leave it out in __getstate__, or use worker_method='thread'."
        ) from error
    layout = oob.layout(lambda span: file_at(span.start) is not None, as_torch=False)
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
            end = align(pieces[-1].offset + nbytes)
    contents = MessageContents(regions, layout.places, oob.views).encode()
    # With the identities of the files: a builder over another shared file differs, even if the bytes are equal.
    head = pickle.dumps((contents, [file.identity for file in shared]), 5)
    return _PicklePlan(head + stream, pieces, end, oob, list(shared), frozenset(modules))


def _dump(obj: object, modules: set[str] | None = None) -> Pickling:
    """Pickle the object, then dicts of the `__main__` definitions that it needs.

    An empty dict ends the stream. `modules` collects the modules of other definitions.
    """
    oob = OutOfBandPickle()
    stream = io.BytesIO()
    if (script := sys.modules.get("__mp_main__")) is not None:
        cloudpickle.register_pickle_by_value(script)
    pickler = _BuilderPickler(stream, oob, set() if modules is None else modules)
    pickler.dump(obj)
    while definitions := pickler.take_definitions():
        pickler.dump(definitions)
    pickler.dump({})
    return stream.getvalue(), oob


class _BuilderPickler(ValuePickler):
    """Pickler that collects definitions of `__main__` and refuses inherited shared memory."""

    def __init__(self, file: io.BytesIO, oob: OutOfBandPickle, modules: set[str]) -> None:
        super().__init__(file, oob)
        self._modules = modules
        self._definitions: dict[str, object] = {}
        self._written: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and (reduced := reduce_shared(obj)) is not None:
            return reduced
        if isinstance(obj, np.ndarray) and (reduced := reduce_file(obj)) is not None:
            return reduced
        if isinstance(obj, types.ModuleType):
            self._modules.add(obj.__name__)
        check_not_shared(obj)
        if isinstance(obj, io.TextIOWrapper) and all(obj is not own for own in (sys.stdin, sys.stdout, sys.stderr)):
            # cloudpickle would copy the text of the whole file, and lose its encoding and position.
            raise pickle.PicklingError("it is an open file, and a worker can only inherit it by a fork")
        if isinstance(obj, (type, types.FunctionType)):
            self._modules.add(str(obj.__module__))
            if obj.__module__ in _MAIN_MODULES:
                self._note_definition(obj)
        return super().reducer_override(obj)

    def take_definitions(self) -> dict[str, object]:
        """Definitions collected since the last call."""
        new = {name: value for name, value in self._definitions.items() if name not in self._written}
        self._written.update(new)
        return new

    def _note_definition(self, obj: types.FunctionType | type) -> None:
        """Collect a definition and its enclosing class, if reachable by name."""
        name = obj.__qualname__
        for reached in {name.partition(".")[0], name} if "<locals>" not in name else ():
            definition = find_definition("__main__", reached)
            if isinstance(definition, (type, types.FunctionType)) and definition.__module__ in _MAIN_MODULES:
                self._definitions[reached] = definition
