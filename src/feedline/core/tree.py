"""The recursion over nested samples and batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def _is_never_leaf(_: Any) -> bool:
    return False


def map_leaves(fn: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = _is_never_leaf) -> Any:
    """The same containers, with `fn(leaf)` in place of every leaf.

    Mappings, named tuples, tuples, lists, other sequences and dataclasses are containers, unless `is_leaf` returns
    True; strings, bytes and everything else are leaves. Dataclasses, named tuples and lists are copied without their
    constructors, which might change the values again. A mapping or sequence that cannot be rebuilt from its parts
    becomes a dict or list. `tree` itself never changes.
    """
    if isinstance(tree, (str, bytes, bytearray)) or is_leaf(tree):
        return fn(tree)
    if isinstance(tree, Mapping):
        return _like_mapping(tree, {key: map_leaves(fn, value, is_leaf) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return like_named_tuple(tree, [map_leaves(fn, value, is_leaf) for value in tree])
    if type(tree) in (list, tuple):
        return type(tree)([map_leaves(fn, value, is_leaf) for value in tree])
    if isinstance(tree, Sequence) and not isinstance(tree, range):
        return _like_sequence(tree, [map_leaves(fn, value, is_leaf) for value in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _like_dataclass(tree, {name: map_leaves(fn, value, is_leaf) for name, value in _fields(tree)})
    return fn(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf, in the order of `map_leaves`."""
    parts = _parts(tree)
    if parts is None:
        yield tree
        return
    for _, value in parts:
        yield from leaves(value)


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf after its path, in the order of `map_leaves`.

    A path has keys, positions and names of fields.
    """
    parts = _parts(tree)
    if parts is None:
        yield path, tree
        return
    for name, value in parts:
        yield from paths(value, (*path, name))


def _parts(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Names and values of a container's parts; None for a leaf."""
    if isinstance(tree, (str, bytes, bytearray)):
        return None
    if isinstance(tree, Mapping):
        return tree.items()
    if isinstance(tree, Sequence) and not isinstance(tree, range):
        return enumerate(tree)
    return _fields(tree) if dataclasses.is_dataclass(tree) and not isinstance(tree, type) else None


def arrays(tree: Any) -> Iterator[torch.Tensor | NDArray[Any]]:
    """Tensors and NumPy arrays among the leaves, in their order."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, (torch.Tensor, np.ndarray)))


def _fields(tree: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a dataclass's fields that have a value."""
    for field in dataclasses.fields(tree):
        with suppress(AttributeError):  # a field with init=False may have none yet
            yield field.name, getattr(tree, field.name)


def _like_dataclass(original: Any, values: dict[str, Any]) -> Any:
    clone = copy.copy(original)
    for name in [name for name in getattr(clone, "__dict__", ()) if _is_cached(clone, name)]:
        del clone.__dict__[name]  # computed from the former values
    for name, value in values.items():
        if value is not getattr(clone, name, clone):  # a field may be a property that only its class can set
            object.__setattr__(clone, name, value)  # also if it is frozen
    return clone


def _is_cached(instance: Any, name: str) -> bool:
    return isinstance(getattr(type(instance), name, None), cached_property)


def like_named_tuple(original: Any, values: Iterable[Any]) -> Any:
    """A named tuple with other values, without its constructor."""
    clone = tuple.__new__(type(original), values)
    if hasattr(original, "__dict__"):
        clone.__dict__.update(original.__dict__)
    return clone


def _like_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    try:
        clone = _copied_mapping(original) if isinstance(original, MutableMapping) else None
        if clone is None:
            built: Any = type(original)(items)  # type: ignore[call-arg]
            return built if built.keys() == items.keys() else items
        for key, value in items.items():
            clone[key] = value
    except Exception:  # noqa: BLE001 - the user's class may raise anything, and a dict has the same items
        return items
    return clone


def _copied_mapping(original: MutableMapping[Any, Any]) -> MutableMapping[Any, Any] | None:
    """A copy with the same attributes; None if it might share items.

    An attribute is, for example, the factory of a defaultdict.
    """
    if _copies_items(original, dict):
        return copy.copy(original)
    attributes = getattr(original, "__dict__", {})
    holders = {name: copy.copy(value) for name, value in attributes.items() if _holds(value, original)}
    if not holders:
        return None
    clone = copy.copy(original)
    vars(clone).update(holders)
    return clone


def _copies_items(original: Any, builtin: type) -> bool:
    """True if `copy.copy` gives a container with its own items."""
    return isinstance(original, builtin) or hasattr(type(original), "__copy__")


def _holds(value: Any, mapping: Mapping[Any, Any]) -> bool:
    """True for a dict with the items of a mapping."""
    return (
        isinstance(value, dict)
        and value.keys() == mapping.keys()
        and all(value[key] is item for key, item in mapping.items())
    )


def _like_sequence(original: Sequence[Any], items: list[Any]) -> Any:
    try:
        if not isinstance(original, MutableSequence) or not _copies_items(original, list):
            built: Any = type(original)(items)  # type: ignore[call-arg]
            return built if len(built) == len(items) else items
        clone = copy.copy(original)
        for place, item in enumerate(items):
            clone[place] = item
    except Exception:  # noqa: BLE001 - the user's class may raise anything, and a list has the same items
        return items
    return clone
