"""Changes of dataset and `collate_fn` in a worker, for its replacement.

A replacement is forked from the objects as they were when the workers started. Values that can safely be copied, such
as random generators, counters and short lists, are recorded with each answer and restored there.
"""

from __future__ import annotations

import io
import operator
import os
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

_MOST_HOLDERS, _MOST_VALUES, _MOST_NBYTES = 64, 128, 2048
"""Limits on watched objects, on attributes or elements of an object, and on bytes of a value. Larger ones hold data."""


_MOST_SEEN = 1000
"""Limit on the objects that are searched for objects to watch."""


_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic)

_CONTAINERS = (list, dict, set, frozenset, tuple, deque)

_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchvision", "numpy", "pandas", "pyarrow", "PIL", "h5py", "zarr", "datasets", "feedline")
}
"""Packages whose objects are not looked into: they hold data, handles, or no state of a dataset."""


ValuePath = tuple[Any, ...]
"""Attribute names, indices and keys from a root to a value."""


class _Missing:
    """Type of the snapshot of an attribute that does not exist."""


class _Opaque(NamedTuple):
    """Snapshot of a value that is not copied."""

    identity: int
    is_lazy: bool
    """True if a replacement can open the value again on first use, such as a file; False for iterators."""


class _Generator(NamedTuple):
    """Snapshot of a random generator."""

    kind: type
    state: bytes


_GENERATORS: tuple[tuple[type, Any, Any], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (
        np.random.Generator,
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    (
        torch.Generator,
        lambda generator: generator.get_state().numpy(),
        lambda generator, state: generator.set_state(torch.from_numpy(state)),
    ),
)
"""Class, reader and writer of the state of each kind of random generator."""


@dataclass(slots=True)
class _Holder:
    """A watched object, its attributes, or its elements that are generators."""

    path: ValuePath
    attributes: dict[str, Any]
    values: tuple[Any, ...] = ()
    baseline: dict[str, Any] = field(default_factory=dict)
    present: dict[str, Any] = field(default_factory=dict)
    mutable: tuple[str, ...] = ()

    def take_snapshot(self) -> None:
        """Take snapshots of all attributes."""
        self.values = tuple(self.attributes.values())
        self.present = {name: _snapshot(value) for name, value in list(self.attributes.items())}
        self.mutable = tuple(
            name
            for name, each in self.present.items()
            if not isinstance(each, _Opaque) and _may_mutate(self.attributes[name])
        )

    def has_changed(self) -> bool:
        """Update the snapshots; True if one differs from before."""
        if len(self.attributes) != len(self.values) or not all(
            map(operator.is_, self.attributes.values(), self.values)
        ):
            former = self.present
            self.take_snapshot()
            return former != self.present
        changed = False
        for name in self.mutable:
            snapshot = _snapshot(self.attributes[name])
            changed |= snapshot != self.present[name]
            self.present[name] = snapshot
        return changed


class ObjectChanges:
    """Changes of the dataset and `collate_fn` since this was created."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._holders = list(islice(_holders(_roots(builder)), _MOST_HOLDERS))
        for holder in self._holders:
            holder.take_snapshot()
            holder.baseline = holder.present.copy()
        self._latest = b""

    def take(self) -> bytes:
        """Packed changes, for `restore_objects`; empty if there are none."""
        state = getattr(self._builder, "dataset_state", None)
        if sum(holder.has_changed() for holder in self._holders) or state is not None:  # each updates its snapshots
            self._latest = self._pack(state)
        return self._latest

    def _pack(self, state: Any) -> bytes:
        generators: dict[ValuePath, _Generator] = {}
        values: dict[ValuePath, bytes] = {}
        lost: list[ValuePath] = []
        is_complete = True
        for holder in self._holders:
            for name in {**holder.baseline, **holder.present}:
                was, now = holder.baseline.get(name, _Missing), holder.present.get(name, _Missing)
                if was == now:
                    continue
                path = (*holder.path, name)
                if isinstance(now, _Generator):
                    generators[path] = now
                elif isinstance(now, bytes) and not _is_descriptor(was, now):
                    values[path] = now
                else:
                    is_complete = False
                    if isinstance(now, _Opaque) and not _is_lazily_opened(was, now):
                        lost.append(path)
        if not (generators or values or lost or state is not None):
            return b""
        # A flag such as `is_open` is wrong without the file that it is about.
        kept = values if is_complete else {}
        lost += [path for path in values.keys() - kept.keys() if _counts(values[path])]
        if state is not None:  # it holds what matters
            lost.clear()
        content = {path: (each.kind, each.state) for path, each in generators.items()}, kept, state
        return pickle.dumps((sorted(map(_format_path, lost)), pickle.dumps(content, 5)), 5)


def pack_changes(generators: bytes, objects: bytes) -> bytes:
    """Pack generator states and object changes into a worker's answer.

    Empty `generators` mean that their states have not changed.
    """
    return len(generators).to_bytes(8, "little") + generators + objects


def unpack_changes(changes: bytes) -> tuple[bytes, bytes]:
    """Return the arguments of `pack_changes`."""
    end = 8 + int.from_bytes(changes[:8], "little")
    return changes[8:end], changes[end:]


def restore_objects(builder: Any, changes: bytes) -> None:
    """Apply the changes that `ObjectChanges.take` packed in another process."""
    if not changes:
        return
    roots = _roots(builder)
    generators, values, state = pickle.loads(pickle.loads(changes)[1])
    if state is not None:
        builder.dataset.load_state_dict(state)
    for path, content in values.items():
        _set(roots, path, pickle.loads(content))
    for path, (kind, state) in generators.items():
        _restore_generator(roots, path, kind, pickle.loads(state))


def lost_changes(changes: bytes | None) -> list[str]:
    """Names of attributes whose changes cannot be restored."""
    return pickle.loads(changes)[0] if changes else []


def _roots(builder: Any) -> dict[str, Any]:
    return {name: getattr(builder, name, None) for name in ("dataset", "collate_fn")}


def _holders(roots: Mapping[str, Any]) -> Iterator[_Holder]:
    known: set[int] = set()
    waiting: list[tuple[ValuePath, Any]] = [((name,), root) for name, root in roots.items()]
    for path, value in waiting:  # grows while it is read
        if isinstance(value, MethodType):
            value = value.__self__  # noqa: PLW2901 - the object of a bound `collate_fn`
            path = (*path, "__self__")  # noqa: PLW2901
        if id(value) in known or len(known) == _MOST_SEEN:
            continue
        known.add(id(value))
        if isinstance(value, (list, tuple, dict)):
            if len(value) <= _MOST_VALUES:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                waiting += [
                    ((*path, _ContainerKey(key)), each) for key, each in items if not isinstance(each, _SCALARS)
                ]
                yield from _generators_in(path, value)
            continue
        attributes = _attributes(value)
        if attributes is not None:
            yield _Holder(path, attributes)
            waiting += [((*path, name), each) for name, each in attributes.items() if not isinstance(each, _SCALARS)]


def _generators_in(path: ValuePath, container: Any) -> Iterator[_Holder]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    found = {_ContainerKey(key): each for key, each in items if _generator_kind(each) is not None}
    if found:
        yield _Holder(path, found)  # type: ignore[arg-type] # keys in place of names


class _ContainerKey(NamedTuple):
    """Index or key in a container, as part of a path."""

    key: Any


def _attributes(value: Any) -> dict[str, Any] | None:
    """Attributes of an object to watch.

    None for functions, classes, objects of `_LIBRARIES`, and objects with too many attributes.
    """
    if isinstance(value, (type, ModuleType, FunctionType)):
        return None
    module = type(value).__module__
    package = module.partition(".")[0]
    if package in _LIBRARIES and not module.startswith("torch.utils.data"):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict and len(attributes) <= _MOST_VALUES else None


def _snapshot(value: Any) -> Any:
    kind = _generator_kind(value)
    if kind is not None:
        return _Generator(type(value), pickle.dumps(kind[1](value), 5))
    if _is_plain(value, [_MOST_VALUES]):
        content = pickle.dumps(value, 5)
        if len(content) <= _MOST_NBYTES:
            return content
    return _Opaque(id(value), not hasattr(type(value), "__next__") or isinstance(value, io.IOBase))


def _generator_kind(value: Any) -> Any:
    if isinstance(value, random.SystemRandom) or (isinstance(value, torch.Generator) and value.device.type != "cpu"):
        return None
    return next((kind for kind in _GENERATORS if isinstance(value, kind[0])), None)


def _is_plain(value: Any, left: list[int]) -> bool:
    """True if a copy can replace the value.

    `left[0]` is the number of elements that it may still have, and is counted down.
    """
    left[0] -= 1
    if left[0] < 0:
        return False
    if isinstance(value, np.generic) or type(value) in _SCALARS:
        return True
    if type(value) is np.ndarray:  # an array over other memory may be shared with other processes
        return bool(value.flags.owndata and value.nbytes <= _MOST_NBYTES and value.dtype != object)
    if type(value) not in _CONTAINERS or len(value) > left[0]:
        return False
    return all(_is_plain(each, left) for each in ((*value, *value.values()) if isinstance(value, dict) else value))


def _may_mutate(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_may_mutate, value))
    return not isinstance(value, (*_SCALARS, frozenset))


def _is_descriptor(was: Any, now: bytes) -> bool:
    """True for the descriptor of a newly opened file."""
    value, former = pickle.loads(now), pickle.loads(was) if isinstance(was, bytes) else None
    if type(value) is not int or value <= 2 or (type(former) is int and former >= 0):
        return False
    try:
        os.fstat(value)
    except (OSError, OverflowError):
        return False
    return True


def _is_lazily_opened(was: Any, now: _Opaque) -> bool:
    return now.is_lazy and was in (_Missing, pickle.dumps(None, 5))


def _counts(content: bytes) -> bool:
    return not isinstance(pickle.loads(content), bool | None)


def _format_path(path: ValuePath) -> str:
    parts = (f"[{part.key!r}]" if isinstance(part, _ContainerKey) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def _get(roots: Mapping[str, Any], path: ValuePath) -> Any:
    value: Any = roots[path[0]]
    for part in path[1:]:
        value = value[part.key] if isinstance(part, _ContainerKey) else getattr(value, part)
    return value


def _set(roots: Mapping[str, Any], path: ValuePath, value: Any) -> None:
    holder = _get(roots, path[:-1])
    present = vars(holder).get(path[-1])
    # In place where possible: other objects may hold the same container.
    if type(present) is type(value) and isinstance(value, (list, deque)):
        present.clear()
        present.extend(value)
    elif type(present) is type(value) and isinstance(value, (dict, set)):
        present.clear()
        present.update(value)
    elif isinstance(value, np.ndarray) and isinstance(present, np.ndarray) and _fits(present, value):
        np.copyto(present, value)
    else:
        vars(holder)[path[-1]] = value


def _fits(present: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> bool:
    return present.shape == value.shape and present.dtype == value.dtype and present.flags.writeable


def _restore_generator(roots: Mapping[str, Any], path: ValuePath, kind: type, state: Any) -> None:
    holder, last = _get(roots, path[:-1]), path[-1]
    present = holder[last.key] if isinstance(last, _ContainerKey) else vars(holder).get(last)
    write = next(write for base, _, write in _GENERATORS if issubclass(kind, base))
    if type(present) is kind and not (kind is np.random.Generator and _bits(present) != state["bit_generator"]):
        write(present, state)
        return
    new = _new_generator(kind, state)
    write(new, state)
    if isinstance(last, _ContainerKey):
        holder[last.key] = new
    else:
        vars(holder)[last] = new


def _bits(generator: Any) -> str:
    return type(generator.bit_generator).__name__


def _new_generator(kind: type, state: Any) -> Any:
    if kind is np.random.Generator:
        return np.random.Generator(getattr(np.random, state["bit_generator"])())
    return kind()
