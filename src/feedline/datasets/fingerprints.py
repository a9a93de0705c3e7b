"""Fingerprints of functions, arguments and datasets, as keys of cached results."""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import operator
import os
import pickle
import platform
import stat
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module, metadata
from io import RawIOBase
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.definitions import module_of_code
from feedline.core.tensors import numpy_view
from feedline.datasets.content_digest import digest_of_files, versioned
from feedline.datasets.strings import PackedStrings
from feedline.errors import ArgumentError
from feedline.stores.base import FileVersion, ObjectInfo

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def fingerprint(*things: Any) -> str:
    """A hexadecimal digest of 16 bytes over the things.

    Contributions by type:

    - a function: its code, defaults, closure, attributes, and the functions and values that it names, in any module;
    - a class: its members, bases and metaclass;
    - functions, classes and modules of Python or of installed packages: name and version;
    - the path of a file, absolute or from the working directory: size and time of change;
    - an object in a store: its version;
    - anything else: its pickle.

    A dataset may define its own in an attribute `fingerprint`, anything else in `_fingerprint`, as datasets of Hugging
    Face do. A dataset whose pickle does not identify its data defines `content_fingerprint`. A class whose pickle
    contains more than its data depend on has a method `__fingerprint__`, whose result replaces the object.
    ArgumentError if something cannot be pickled, or if its changes cannot be detected.
    """
    return _fingerprint(_WorkingDirectory(), *things)


def _fingerprint(here: _WorkingDirectory, *things: Any) -> str:
    digest = _Digest()
    try:
        _Fingerprinter(digest, here).dump(things)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"no fingerprint can be computed ({error}): objects that a function or dataset refers to must be picklable,"
            " to identify cached results"
        ) from error
    return digest.hash.hexdigest()


class _WorkingDirectory:
    """The names in the working directory, listed once.

    A lookup of every text of a large dataset would take minutes on a file server.
    """

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        with suppress(OSError):
            return frozenset((*os.listdir(), ".", ".."))  # noqa: PTH208 - names only
        return frozenset()

    def may_hold(self, path: str) -> bool:
        """True for a relative path whose first part exists."""
        return path.partition("/")[0] in self._names


class _Digest(RawIOBase):
    """A writable file that only updates a digest."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


class _Fingerprinter(pickle.Pickler):
    """Pickles into a digest, with global names resolved to objects."""

    def __init__(self, digest: _Digest, here: _WorkingDirectory) -> None:
        super().__init__(digest, protocol=5, buffer_callback=lambda buffer: digest.hash.update(buffer.raw()))
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        self._here = here

    def persistent_id(self, thing: Any) -> Any:
        if type(thing) is str:
            return _text(self._here, thing)
        describe = self._description(thing)
        if describe is None:
            return None
        if id(thing) in self._seen:
            return "again", self._seen[id(thing)]
        self._seen[id(thing)] = len(self._seen)
        self._kept.append(thing)  # the reference prevents reuse of its id
        return describe(thing)

    def _description(self, thing: Any) -> Callable[[Any], Any] | None:
        with_paths = _WITH_PATHS.get(type(thing))
        if with_paths is not None:
            return functools.partial(with_paths, self._here)
        return _DESCRIPTIONS.get(type(thing)) or _by_base(thing)


def _by_base(thing: Any) -> Callable[[Any], Any] | None:
    if isinstance(thing, type):
        return _class
    if hasattr(type(thing), "__fingerprint__"):
        return _stand_in
    if isinstance(thing, torch.Tensor):
        return _tensor
    if isinstance(thing, torch.utils.data.Dataset) or hasattr(thing, "_fingerprint"):
        if _own_fingerprint(thing) is not None:
            return _own_fingerprint
        return _with_content if hasattr(type(thing), "content_fingerprint") else None
    return _file if isinstance(thing, os.PathLike) else None


def _package_version(module: str) -> tuple[str, str] | None:
    """Name and version of a module's package; None for the user's modules.

    All modules are the user's, except those of Python, feedline and installed packages.
    """
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return root, platform.python_version()
    loaded = sys.modules.get(root)
    if root == "feedline" or any(part in (getattr(loaded, "__file__", None) or "") for part in _INSTALLED):
        return root, str(getattr(loaded, "__version__", None) or _distributed_version(root))
    return None


@functools.cache
def _distributed_version(root: str) -> str:
    """Versions of the distributions that installed a package without `__version__`."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in metadata.packages_distributions().get(root, ()))


def _package_version_of(function: types.FunctionType) -> tuple[str, str] | None:
    """Release of a function's package; None for code of the user's."""
    release, own = (_package_version(name or "") for name in (function.__module__, module_of_code(function)))
    if release is None or own is None or "<locals>" in function.__qualname__:
        return None
    # A decorator of a package may have wrapped the function of another package, with arguments of the user's.
    is_plain = "<locals>" not in function.__code__.co_qualname
    return release if is_plain or _found(function.__module__, function.__qualname__) is function else None


def _found(module: str, name: str) -> Any:
    """Object of that name in an imported module, or None."""
    with suppress(KeyError, AttributeError):
        return operator.attrgetter(name)(sys.modules[module])
    return None


def _function(function: types.FunctionType) -> Any:
    release = _package_version_of(function)
    if release is not None:
        return "of", release, function.__module__, function.__qualname__
    code = function.__code__
    codes = list(_codes(code))
    names = sorted({name for each in codes for name in each.co_names})
    imported = [module for each in codes for module in _imported(each, function.__globals__.get("__package__"))]
    further = [_resolve_global(each, names) for each in (*imported, *map(_content, function.__closure__ or ()))]
    named = _resolve_names(function.__globals__, names)
    values = function.__defaults__, function.__kwdefaults__, vars(function)
    return function.__qualname__, _code(code), values, further, named


def _resolve_names(
    known: Mapping[str, Any], names: Sequence[str], outer: tuple[types.ModuleType, ...] = ()
) -> dict[str, Any]:
    return {name: _resolve_global(known[name], names, outer) for name in names if name in known}


def _resolve_global(value: Any, names: Sequence[str], outer: tuple[types.ModuleType, ...] = ()) -> Any:
    """Resolve a global; for the user's modules, follow the attributes read."""
    if not isinstance(value, types.ModuleType) or _package_version(value.__name__) or value in outer:
        return value
    return _module(value), _resolve_names(vars(value), names, (*outer, value))


def _content(cell: Any) -> Any:
    with suppress(ValueError):  # a closure variable without a value yet
        return cell.cell_contents
    return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _imported(code: types.CodeType, package: str | None) -> list[types.ModuleType]:
    """The modules that a function imports when it is called."""
    steps, found = list(dis.get_instructions(code)), list[types.ModuleType]()
    for level, step in zip(steps, steps[2:], strict=False):
        with suppress(ImportError, TypeError):  # the function itself would fail the same way
            if step.opname == "IMPORT_NAME":
                found.append(import_module("." * level.argval + step.argval, package))
            elif step.opname == "IMPORT_FROM" and found and not hasattr(found[-1], step.argval):
                found.append(import_module(f"{found[-1].__name__}.{step.argval}"))
    return found


def _code(code: types.CodeType) -> Any:
    constants = [_code(each) if isinstance(each, types.CodeType) else each for each in code.co_consts]
    parameters = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    # As bytes, because texts may be paths of files.
    names = repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode()
    return code.co_code, code.co_exceptiontable, constants, parameters, names


_DERIVED = {
    *("__module__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("__abstractmethods__", "_abc_impl"),
    "_value2member_map_",  # grows with each combination of flags that is used
    # Made of the fields by pydantic, and different in each process.
    *("__pydantic_core_schema__", "__pydantic_validator__", "__pydantic_serializer__", "__signature__"),
}
"""Members that Python adds to classes; most others, also those added by decorators, may be of influence."""


_LOCKS = (type(threading.Lock()), type(threading.RLock()))
"""Types of members without a value."""


def _class(cls: type) -> Any:
    release = _package_version(cls.__module__)
    if release is not None and "<locals>" not in cls.__qualname__:
        return "of", release, cls.__module__, cls.__qualname__
    members = {
        name: value for name, value in vars(cls).items() if name not in _DERIVED and not isinstance(value, _LOCKS)
    }
    return cls.__qualname__, members, cls.__bases__, type(cls)


def _dataclass_field(field: dataclasses.Field[Any]) -> Any:
    # The type is an annotation; the default is a member of the class, or a value of its `__init__`.
    return "field", {name: getattr(field, name) for name in field.__slots__ if name not in {"type", "default"}}


def _module(module: types.ModuleType) -> Any:
    """Version of an installed module, or source of a user's module."""
    release = _package_version(module.__name__)
    if release is not None:
        return "module", module.__name__, release
    source = getattr(module, "__file__", None)
    return "module", module.__name__, Path(source).read_bytes() if source else None


def _tensor(tensor: torch.Tensor) -> Any:
    return "tensor", str(tensor.dtype), numpy_view(tensor.detach().resolve_conj().resolve_neg().cpu())


def _array(array: NDArray[Any]) -> Any:
    # Without `pickle`, which distinguishes read-only arrays from writable ones: for a copy this does not matter.
    if array.dtype.hasobject or not array.dtype.itemsize:
        return None
    content = hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16)
    return "array", array.dtype.descr, array.shape, content.digest()


def _own_fingerprint(dataset: Any) -> Any:
    own = getattr(dataset, "fingerprint", None)
    own = getattr(dataset, "_fingerprint", None) if own is None else own
    return None if own is None else ("own", type(dataset).__qualname__, str(own))


def _stand_in(thing: Any) -> Any:
    return "instead", thing.__fingerprint__()


def _with_content(dataset: Any) -> Any:
    return "content", type(dataset), dataset.content_fingerprint, dataset.__getstate__()


def _set(here: _WorkingDirectory, things: Iterable[Any]) -> Any:
    return "set", sorted(_fingerprint(here, thing) for thing in things)


def _strings(here: _WorkingDirectory, strings: PackedStrings) -> Any:
    """The strings, and the versions of files that they may name."""
    paths = [text for text in strings if text.startswith("/") or (here.may_hold(text) and _file(text))]
    return "strings", strings.__getstate__(), digest_of_files(paths) if paths else None


def _object(info: ObjectInfo) -> Any:
    return "object", versioned(info).path, info.size, info.version


def _text(here: _WorkingDirectory, text: str) -> Any:
    # Separate bytes: a pickle shows if two equal strings are one object, which a copy may change.
    file = _file(text) if text.startswith("/") or here.may_hold(text) else None
    return file or text.encode("utf-8", "surrogatepass")


def _file(path: Any) -> Any:
    """The version of the file of a path."""
    text = os.fspath(path)
    if not isinstance(text, str):
        return None
    with suppress(OSError, ValueError):
        status = os.stat(text)  # noqa: PTH116 - called for many strings
        if stat.S_ISREG(status.st_mode):  # a folder changes with every file in it
            return "file", text.encode("utf-8", "surrogatepass"), *FileVersion.of(status)
    return None


_VARIABLES = (TypeVar, ParamSpec, TypeVarTuple)


_DESCRIPTIONS: dict[type, Callable[[Any], Any]] = {
    types.FunctionType: _function,
    types.MethodType: lambda method: (method.__func__, method.__self__),
    types.ModuleType: _module,
    functools._lru_cache_wrapper: lambda cached: ("cached", cached.__wrapped__),
    staticmethod: lambda method: ("static", method.__func__),
    classmethod: lambda method: ("class", method.__func__),
    property: lambda prop: (prop.fget, prop.fset, prop.fdel),
    functools.cached_property: lambda prop: ("cached", prop.func),
    functools.singledispatchmethod: lambda method: ("dispatched", method.func, method.dispatcher.registry),
    dataclasses.Field: _dataclass_field,
    types.MappingProxyType: lambda proxy: ("mapping", dict(proxy)),
    **dict.fromkeys(_VARIABLES, lambda variable: ("variable", variable.__name__)),
    **dict.fromkeys((np.ndarray, np.memmap), _array),
    ObjectInfo: _object,
}


_WITH_PATHS: dict[type, Callable[[_WorkingDirectory, Any], Any]] = {
    **dict.fromkeys((set, frozenset), _set),
    PackedStrings: _strings,
}
