"""Checks that objects of a library have only the library's own code."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


_replacements: set[object] = set()
"""Functions of feedline that replace those of a library, with equal results."""


def note_replacement(function: object) -> None:
    """Count a function as code of the library it replaces."""
    _replacements.add(function)


def qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def why_modified(value: Any, package: str) -> str | None:
    """Reason why `value` may run code from outside of `package`, or None.

    Checks the class and its bases, attributes of the object that hide methods, and the hooks of modules.
    """
    kind = type(value)
    root = package_folder(package)
    module = sys.modules.get(kind.__module__)
    if root is None or getattr(module, kind.__name__, None) is not kind:
        return f"{kind.__name__} is not a class of {package}"
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == package:
            patched = _patched_method(base, root)
            if patched:
                return f"{base.__name__}.{patched} was replaced"
    hidden = next((name for name in vars(value) if callable(getattr(kind, name, None))), None)
    if hidden is not None:
        return f"this {kind.__name__} has a {hidden} of its own"
    return f"this {kind.__name__} has hooks" if _has_hooks(value) else None


def is_from(function: Any, package: str) -> bool:
    """True if the code of a function is in `package`."""
    root = package_folder(package)
    return root is not None and isinstance(function, FunctionType) and _lies_in(function, root)


def replaced_function(module: ModuleType, package: str, names: tuple[str, ...]) -> str | None:
    """Name of the first function that is not the package's, or None."""
    return next((name for name in names if not is_from(getattr(module, name, None), package)), None)


@lru_cache(maxsize=16)
def _folder_of(file: str) -> str:
    return str(Path(file).parent)


def package_folder(package: str) -> str | None:
    """Folder of an imported package; None if it is not imported."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return None if file is None else _folder_of(file)


def _patched_method(kind: type, root: str) -> str | None:
    for name, value in vars(kind).items():
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(function, FunctionType) and not (_lies_in(function, root) or function in _replacements):
            return name
    return None


def _lies_in(function: FunctionType, root: str) -> bool:
    return function.__code__.co_filename.startswith(root)


def _has_hooks(value: Any) -> bool:
    if not isinstance(value, torch.nn.Module):
        return False
    everywhere = any(getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS)
    own = value._forward_hooks or value._forward_pre_hooks or value._compiled_call_impl is not None
    return bool(everywhere or own)
