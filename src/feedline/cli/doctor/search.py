"""Attributes within attributes of a dataset: its files, handles and generators."""

from __future__ import annotations

import socket
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from io import IOBase
from itertools import islice
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset

DEPTH = 4
"""Levels of nested attributes that are searched for handles and generators."""


def attributes(
    obj: Any, path: str = "", depth: int = DEPTH, seen: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Attributes of an object, and their attributes, with their paths.

    The first elements of containers are searched for attributes, but only `parts` yields them themselves. A container
    adds no level to `depth`.
    """
    if depth == 0 or id(obj) in seen:
        return
    seen |= {id(obj)}
    path = path or type(obj).__name__
    named = dict(vars(obj)) if hasattr(obj, "__dict__") and not isinstance(obj, type) else {}
    if isinstance(obj, _WRAPPERS):
        named = {name: named[name] for name in ("dataset", "datasets") if name in named}
    elif type(obj).__module__.split(".")[0] in _OPAQUE:
        named = {}
    for name, value in named.items():
        yield f"{path}.{name}", value
        for place, inner in _members(value):
            yield from attributes(inner, f"{path}.{name}{place}", depth - 1, seen)


_WRAPPERS = (Subset, ConcatDataset, StackDataset, ChainDataset)


_OPAQUE = {"torch", "numpy", "builtins", "pathlib", "feedline", "pyarrow"}
"""Packages whose objects are not searched, because they manage their own handles."""


def parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object, and the first elements of their containers."""
    for path, value in attributes(obj):
        yield from ((f"{path}{place}", inner) for place, inner in _members(value))


_FEW = 20
"""Elements of a container that are searched."""


_NESTED = 2
"""Levels of containers within containers that are searched."""


def _members(value: Any, levels: int = _NESTED) -> Iterator[tuple[str, Any]]:
    """The value and the elements in it, with their places."""
    yield "", value
    elements: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        elements = value.items()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        elements = enumerate(value)
    for key, element in list(islice(elements, _FEW)) if levels else ():
        yield from ((f"[{key!r}]{place}", inner) for place, inner in _members(element, levels - 1))


def is_handle(value: Any) -> bool:
    """True for open files, sockets and connections."""
    if isinstance(value, IOBase):
        return value.__class__.__module__ == "_io" and _has_descriptor(value)
    if isinstance(value, socket.socket):
        return _has_descriptor(value)
    if isinstance(value, sqlite3.Connection):
        return _succeeds(lambda: value.in_transaction)
    is_open = _OPEN.get(kind_of(value))
    return is_open is not None and is_open(value)


def _has_descriptor(file: Any) -> bool:
    try:
        return int(file.fileno()) >= 0
    except (OSError, ValueError):  # in memory, or closed
        return False


def _succeeds(ask: Callable[[], object]) -> bool:
    """True unless a library refuses a question, as it does after closing."""
    try:
        ask()
    except Exception:  # noqa: BLE001 - each library has errors of its own
        return False
    return True


_OPEN: dict[str, Callable[[Any], bool]] = {
    "h5py._hl.files.File": bool,
    "builtins.Environment": lambda environment: _succeeds(environment.path),  # LMDB's class does not name its module
    "psycopg.Connection": lambda connection: not connection.closed,
    "redis.client.Redis": lambda _: True,  # connects again when it is used
}
"""For each kind of other handles, by its name: whether one is open."""


def kind_of(value: Any) -> str:
    """Qualified name of the type; for files without the module."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("_io.")
