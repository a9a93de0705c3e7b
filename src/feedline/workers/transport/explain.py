"""Search for the part of an object that cannot be pickled."""

from __future__ import annotations

import copyreg
import functools
import inspect
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch

NamedPart = tuple[str, Any]


_SCALARS = (str, bytes, bytearray, int, float, complex, type(None))


_MAX_DEPTH = 40


def explain_unpicklable(obj: object, name: str = "obj", dumps: Callable[[Any], object] = pickle.dumps) -> str:
    """Path and type of the first part of `obj` that `dumps` refuses.

    For example `batch['meta'][3].handle (type lock)`. Walks containers, attributes, slots, partials, methods, closures
    and classes. It pickles every part on the path, and is therefore for error messages only. Returns `obj` itself if no
    part is refused.
    """
    label, part = _search(obj, dumps, {id(obj): obj}) or ("", obj)
    return f"{name}{label} (type {_type_name(part)})"


def _search(obj: object, dumps: Callable[[Any], object], seen: dict[int, object]) -> NamedPart | None:
    """First refused part; None if it is already being searched."""
    through_seen = False
    for label, part in _parts(obj) if len(seen) < _MAX_DEPTH else ():
        if isinstance(part, _SCALARS) or not _is_refused(part, dumps):
            continue
        if id(part) not in seen and (found := _search(part, dumps, {**seen, id(part): part})) is not None:
            return label + found[0], found[1]
        through_seen = True
    return None if through_seen else ("", obj)


def _is_refused(obj: object, dumps: Callable[[Any], object]) -> bool:
    try:
        dumps(obj)
    except Exception:  # noqa: BLE001 - any error of a user's __reduce__ or __getstate__ is a refusal
        return True
    return False


def _parts(obj: object) -> Iterator[NamedPart]:
    match obj:
        case Mapping() | list() | tuple() | set() | frozenset() | np.ndarray():
            yield from _parts_of_container(obj)
        case torch.Tensor():
            yield from _parts_of_state(vars(obj))
        case functools.partial():
            yield ".func", obj.func
            yield from ((f".args[{i}]", value) for i, value in enumerate(obj.args))
            yield from ((f".keywords[{key!r}]", value) for key, value in obj.keywords.items())
        case types.MethodType() | types.BuiltinMethodType():
            yield ".__self__", obj.__self__
        case types.FunctionType():
            yield from _parts_of_function(obj)
        case type():
            yield from _parts_of_state(dict(vars(obj)))
        case _:
            yield from _parts_of_instance(obj)


def _parts_of_container(obj: object) -> Iterator[NamedPart]:
    match obj:
        case Mapping():
            yield from ((f"[{short_repr(key)}]", value) for key, value in obj.items())
            yield from ((f".<key {i}>", key) for i, key in enumerate(obj))
        case tuple() if hasattr(obj, "_fields"):
            yield from ((f".{field}", value) for field, value in zip(obj._fields, obj, strict=True))
        case list() | tuple():
            yield from ((f"[{i}]", value) for i, value in enumerate(obj))
        case set() | frozenset():
            yield from ((f".<element {short_repr(value)}>", value) for value in obj)
        case np.ndarray() if obj.dtype.hasobject:
            yield from ((f"[{', '.join(map(str, at))}]", value) for at, value in np.ndenumerate(obj))


def _parts_of_function(function: types.FunctionType) -> Iterator[NamedPart]:
    variables = inspect.getclosurevars(function)
    yield from ((f".<nonlocal {key}>", value) for key, value in variables.nonlocals.items())
    yield from ((f".<global {key}>", value) for key, value in variables.globals.items())
    yield from ((f".<default {i}>", value) for i, value in enumerate(function.__defaults__ or ()))
    yield from ((f".<default {key}>", value) for key, value in (function.__kwdefaults__ or {}).items())


def _parts_of_instance(obj: object) -> Iterator[NamedPart]:
    """Parts that pickling would write: attributes, constructor arguments, items."""
    try:
        reducer = copyreg.dispatch_table.get(type(obj))
        reduced = reducer(obj) if reducer else obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - the object itself refuses, so there are no parts to search
        return
    if isinstance(reduced, str):
        return
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    yield from _parts_of_state(state)
    yield from ((f".<argument {i}>", value) for i, value in enumerate(arguments))
    yield from ((f"[{i}]", value) for i, value in enumerate(items or ()))
    yield from ((f"[{short_repr(key)}]", value) for key, value in pairs or ())


def _parts_of_state(state: object) -> Iterator[NamedPart]:
    match state:
        case dict():
            yield from ((f".{name}", value) for name, value in state.items())
        case (dict() | None as attributes, dict() as slots):
            yield from ((f".{name}", value) for name, value in {**(attributes or {}), **slots}.items())
        case _:
            yield ".<state>", state


def _type_name(obj: object) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
