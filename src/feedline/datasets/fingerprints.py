"""Fingerprints: what a function, its arguments and a dataset are, so that a result kept on disk is known to fit."""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import RawIOBase
from typing import Any

import torch

from feedline.errors import ArgumentError
from feedline.rows import numpy_view

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def fingerprint(*things: Any) -> str:
    """16 bytes in hexadecimal digits that change with the things.

    Of a function: its code, defaults, closure, and the functions and values of its module that it names; of a class:
    its methods; of functions and classes of Python or of installed packages: name and version; of a path to a file:
    size and time of change; of everything else: its pickle. A dataset may tell its own in an attribute `fingerprint`
    (or `_fingerprint`, as those of Hugging Face). ArgumentError if something cannot be pickled.
    """
    digest = _Digest()
    try:
        _Fingerprinter(digest).dump(things)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"no fingerprint can be taken ({error}): what a function or dataset refers to must be picklable, so that a"
            " kept result is not taken for that of another"
        ) from error
    return digest.hash.hexdigest()


class _Digest(RawIOBase):
    """A file that keeps nothing but a digest of what is written."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


class _Fingerprinter(pickle.Pickler):
    """Pickles into a digest; what pickle would note by name only is replaced by what stands behind the name."""

    def __init__(self, digest: _Digest) -> None:
        super().__init__(digest, protocol=5, buffer_callback=lambda buffer: digest.hash.update(buffer.raw()))
        self._seen: set[int] = set()
        self._kept: list[Any] = []

    def persistent_id(self, thing: Any) -> Any:
        describe = _DESCRIPTIONS.get(type(thing)) or _by_base(thing)
        if describe is None:
            return None
        if id(thing) in self._seen and not isinstance(thing, str):
            return "again", getattr(thing, "__qualname__", "")
        self._seen.add(id(thing))
        self._kept.append(thing)  # else another thing might come to have its id
        return describe(thing)


def _by_base(thing: Any) -> Callable[[Any], Any] | None:
    if isinstance(thing, type):
        return None if _release(thing.__module__) else _class
    if isinstance(thing, torch.Tensor):
        return _tensor
    if isinstance(thing, torch.utils.data.Dataset) or hasattr(thing, "_fingerprint"):
        return _told if _told(thing) is not None else None
    return _file if isinstance(thing, os.PathLike) else None


def _release(module: str) -> tuple[str, str] | None:
    """The package, and its version, that a module is part of if it is not the user's own: Python's, ours, installed."""
    root = module.partition(".")[0]
    if root == "feedline" or root in sys.stdlib_module_names:
        return root, ""
    loaded = sys.modules.get(root)
    if any(part in (getattr(loaded, "__file__", None) or "") for part in _INSTALLED):
        return root, str(getattr(loaded, "__version__", ""))
    return None


def _function(function: types.FunctionType) -> Any:
    release = _release(function.__module__ or "")
    if release is not None and "<locals>" not in function.__qualname__:
        return "of", release, function.__module__, function.__qualname__
    code = function.__code__
    named = {name: function.__globals__[name] for name in sorted(_names(code)) if name in function.__globals__}
    cells = [_content(cell) for cell in function.__closure__ or ()]
    return function.__qualname__, _code(code), function.__defaults__, function.__kwdefaults__, cells, named


def _content(cell: Any) -> Any:
    with suppress(ValueError):  # a variable that was not yet given a value
        return cell.cell_contents
    return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _code(code: types.CodeType) -> Any:
    constants = [_code(each) if isinstance(each, types.CodeType) else each for each in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars


def _class(cls: type) -> Any:
    members = {name: value for name, value in vars(cls).items() if name not in {"__dict__", "__weakref__"}}
    plain = (types.FunctionType, staticmethod, classmethod, property, str, int, float, tuple, bool)
    return cls.__qualname__, {n: v for n, v in members.items() if isinstance(v, plain)}, cls.__bases__


def _tensor(tensor: torch.Tensor) -> Any:
    return "tensor", str(tensor.dtype), numpy_view(tensor.detach().cpu())


def _told(dataset: Any) -> Any:
    told = getattr(dataset, "fingerprint", None)
    told = getattr(dataset, "_fingerprint", None) if told is None else told
    return None if told is None else ("told", type(dataset).__qualname__, str(told))


def _file(path: Any) -> Any:
    """A text that is the absolute path of a file stands for the file as it is now."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text.startswith("/"):
        return None
    with suppress(OSError, ValueError):
        status = os.stat(text)  # noqa: PTH116 - asked of every text
        if stat.S_ISREG(status.st_mode):  # a folder changes with whatever is put into it
            return "file", text.encode(), status.st_size, status.st_mtime_ns
    return None


_DESCRIPTIONS: dict[type, Callable[[Any], Any]] = {
    types.FunctionType: _function,
    types.MethodType: lambda method: (method.__func__, method.__self__),
    types.ModuleType: lambda module: ("module", module.__name__, getattr(module, "__version__", None)),
    staticmethod: lambda method: method.__func__,
    classmethod: lambda method: method.__func__,
    property: lambda prop: (prop.fget, prop.fset),
    set: lambda things: ("set", sorted(map(fingerprint, things))),
    frozenset: lambda things: ("set", sorted(map(fingerprint, things))),
    str: _file,
}
