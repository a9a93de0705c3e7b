"""The recursion over nested samples and batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def _is_never_leaf(_: Any) -> bool:
    return False


def map_leaves(fn: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = _is_never_leaf) -> Any:
    """The same containers, with `fn(leaf)` in place of every leaf.

    Mappings, named tuples, tuples, lists, other sequences and dataclasses are containers, unless `is_leaf` returns
    True; strings, bytes and everything else are leaves. A container that cannot be rebuilt from its parts becomes a
    dict or list.
    """
    if isinstance(tree, (str, bytes, bytearray)) or is_leaf(tree):
        return fn(tree)
    if isinstance(tree, Mapping):
        return _like_mapping(tree, {key: map_leaves(fn, value, is_leaf) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(fn, value, is_leaf) for value in tree))
    if type(tree) in (list, tuple):
        return type(tree)([map_leaves(fn, value, is_leaf) for value in tree])
    if isinstance(tree, Sequence) and not isinstance(tree, range):
        return _like_sequence(tree, [map_leaves(fn, value, is_leaf) for value in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return dataclasses.replace(
            tree, **{f.name: map_leaves(fn, getattr(tree, f.name), is_leaf) for f in dataclasses.fields(tree) if f.init}
        )
    return fn(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf, in the order of `map_leaves`."""
    if isinstance(tree, (str, bytes, bytearray)):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, Sequence) and not isinstance(tree, range):
        for value in tree:
            yield from leaves(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name))
    else:
        yield tree


def arrays(tree: Any) -> Iterator[torch.Tensor | NDArray[Any]]:
    """Tensors and NumPy arrays among the leaves, in their order."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, (torch.Tensor, np.ndarray)))


def _like_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    try:
        if isinstance(original, MutableMapping):  # keeps other attributes, such as the factory of a defaultdict
            clone = copy.copy(original)
            for key, value in items.items():
                clone[key] = value
            return clone
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _like_sequence(original: Sequence[Any], items: list[Any]) -> Any:
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
