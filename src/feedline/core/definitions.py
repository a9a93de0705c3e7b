"""Modules that contain the code of functions."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def module_of_code(function: Any) -> str | None:
    """Name of the module that contains the code of a function.

    `functools.wraps` gives the user's function the `__module__` of the function that it wraps. Its code still uses the
    names of the user's module. For objects that are not written in Python, it is their `__module__`.
    """
    plain = getattr(function, "__func__", function)
    if isinstance(plain, FunctionType):
        module = plain.__globals__.get("__name__")
    else:
        module = getattr(plain, "__module__", None)
    return module if isinstance(module, str) else None
