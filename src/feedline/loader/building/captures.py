"""States of users' datasets and iterators, and captures of workers."""

from __future__ import annotations

import inspect
import pickle
import sys
from typing import Any

from feedline.core.dataset import declared


def is_stateful(thing: Any) -> bool:
    """True if `state_dict()` and `load_state_dict(state)` can be called."""
    methods = declared(thing, "state_dict"), declared(thing, "load_state_dict")
    return all(map(callable, methods)) and not _needs_arguments(methods[0])


def _needs_arguments(method: Any) -> bool:
    """True for a `state_dict` of another protocol, such as litdata's."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # built-in methods
        return False
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def split_capture(captured: bytes) -> tuple[bytes, Any]:
    """Generator states and dataset state of a capture; None without the latter."""
    content = pickle.loads(captured)
    return content if len(content) == 2 else (captured, None)


def traveling_schemes() -> object:
    """The store schemes registered in this process; unpickling registers them.

    They precede the dataset in a builder's state, because unpickling a dataset may open stores.
    """
    schemes = sys.modules.get("feedline.stores.schemes")  # not loaded here: most loaders do without stores
    return None if schemes is None else schemes.registered_schemes()
