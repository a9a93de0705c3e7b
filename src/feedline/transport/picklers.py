"""The C pickler with a parcel for what it leaves out; by value where nothing else helps."""

from __future__ import annotations

import io
import operator
import pickle
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from feedline.transport.parcel import Parcel

Pickling = tuple[bytes, Parcel]
"""A stream, and what was left out of it."""


class ReferencePickler(pickle.Pickler):
    """Functions and classes travel by name, as is usual."""

    def __init__(self, file: io.BytesIO, parcel: Parcel) -> None:
        super().__init__(file, 5, buffer_callback=parcel.take_buffer)
        self._parcel = parcel

    def reducer_override(self, obj: Any) -> Any:
        return self._parcel.reduce(obj)


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Functions and classes travel by value if they cannot be imported, or come from `__main__`."""

    def __init__(self, file: io.BytesIO, parcel: Parcel) -> None:
        super().__init__(file, 5, buffer_callback=parcel.take_buffer)
        self._parcel = parcel

    def reducer_override(self, obj: Any) -> Any:
        reduced = self._parcel.reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class MixedPickler(ValuePickler):
    """By name what can be found by its name, be it in `__main__`, and only the rest by value."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and find_definition(obj.__module__, obj.__qualname__) is obj:
            return NotImplemented
        return super().reducer_override(obj)


def pickled(obj: Any, pickler: Callable[[io.BytesIO, Parcel], pickle.Pickler]) -> Pickling:
    parcel = Parcel()
    stream = io.BytesIO()
    pickler(stream, parcel).dump(obj)
    return stream.getvalue(), parcel


def find_definition(module: str | None, name: str) -> object:
    """What a module that is imported already calls by that qualified name, or None."""
    try:
        return operator.attrgetter(name)(sys.modules[module or "__main__"])
    except (KeyError, AttributeError):
        return None
