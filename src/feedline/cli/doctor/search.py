"""Attributes within attributes of a dataset: its files, handles and generators."""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Iterator
from io import IOBase
from typing import Any

from torch.utils.data import Subset

DEPTH = 4
"""Levels of nested attributes that are searched for handles and generators."""


def attributes(
    obj: Any, path: str = "", depth: int = DEPTH, seen: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Attributes of an object, and their attributes, with their paths.

    The first elements of dicts, lists and tuples are searched for attributes, but not yielded themselves. A container
    adds no level to `depth`.
    """
    if depth == 0 or id(obj) in seen:
        return
    seen |= {id(obj)}
    path = path or type(obj).__name__
    parts = dict(vars(obj)) if hasattr(obj, "__dict__") and not isinstance(obj, type) else {}
    if isinstance(obj, Subset) or type(obj).__module__.split(".")[0] in _OPAQUE:
        parts = {"dataset": obj.dataset} if isinstance(obj, Subset) else {}
    for name, value in parts.items():
        yield f"{path}.{name}", value
        for place, inner in _members(value):
            yield from attributes(inner, f"{path}.{name}{place}", depth - 1, seen)


_OPAQUE = {"torch", "numpy", "builtins", "pathlib", "feedline", "pyarrow"}
"""Packages whose objects are not searched, because they manage their own handles."""


_FEW = 20


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    yield "", value
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items())[:_FEW])
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{k}]", part) for k, part in enumerate(value[:_FEW]))


def is_handle(value: Any) -> bool:
    """True for open files, and for sockets and connections."""
    if isinstance(value, IOBase):
        return (
            not value.closed
            and value.__class__.__module__ == "_io"
            and hasattr(value, "fileno")
            and _has_descriptor(value)
        )
    if isinstance(value, (socket.socket, sqlite3.Connection)):
        return True
    return kind_of(value) in {"h5py._hl.files.File", "lmdb.Environment", "psycopg.Connection", "redis.client.Redis"}


def _has_descriptor(file: Any) -> bool:
    try:
        return int(file.fileno()) >= 0
    except (OSError, ValueError):  # in memory, or closed
        return False


def kind_of(value: Any) -> str:
    """Qualified name of the type; for files without the module."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("_io.")
