"""Schemes: the form of addresses, and the functions that open them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from feedline.core.arguments import check_one_of
from feedline.errors import ArgumentError
from feedline.stores.base import Store
from feedline.stores.options import StoreOptions
from feedline.stores.requests import Requests
from feedline.stores.retry import Retry

HostPart = Literal["required", "optional", "none"]
UserPart = Literal["refused", "name", "any"]

_NAME = re.compile(r"[a-z][a-z0-9+.-]*")


class StorePolicy(NamedTuple):
    """The settings that apply to every kind of store."""

    retry: Retry
    requests: Requests


@dataclass(frozen=True, slots=True)
class Scheme:
    """The properties of one scheme of addresses, `name://host/path`."""

    open: Callable[[str, StoreOptions, StorePolicy], Store]
    """`open(url, options, policy)` returns the store at an address. It should send no request yet. For use in worker
    processes, it must be picklable: a function of a module, or of the main program.
    """
    host: HostPart = "required"
    """The part before the first slash, a bucket or server: required, needed only if there is a slash, or absent."""
    user: UserPart = "name"
    """The part before an @ in the host: refused; a name without a password; or any text, because it is not a secret."""
    lists: bool = True
    """True if its stores can list objects."""
    quoted: bool = False
    """True if paths are percent-quoted and end at a question mark, as in a browser."""
    links: bool = False
    """True if a query after a question mark is a part of the path, as in presigned links."""
    credentials: str = ""
    """The environment variables of the credentials, which messages about missing credentials name."""
    install: str | None = None
    """The argument of `pip install`, which the message names if `open` raises ModuleNotFoundError."""


SCHEMES: dict[str, Scheme] = {}
"""The row of each scheme by its name in lower case; `stores.open` adds the schemes of feedline."""

OTHERS = "*"
"""The name of the row for schemes that have none of their own."""

_added: dict[str, Scheme] = {}


def register_scheme(name: str, scheme: Scheme) -> None:
    """Make addresses `name://...` known to all stores and datasets.

    The scheme is known in this process and in worker processes of its loaders. A scheme that was registered before is
    replaced. ArgumentError for a scheme of feedline.
    """
    _check_row(name, scheme)
    if name in SCHEMES and name not in _added:
        raise ArgumentError(f"register_scheme({name!r}): feedline opens {name}:// itself; use another name")
    SCHEMES[name] = _added[name] = scheme


def _check_row(name: Any, scheme: Any) -> None:
    call = f"register_scheme({name!r})"
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ArgumentError(f"{call}: a scheme must be a string of lower-case letters, digits, +, - and .")
    if not isinstance(scheme, Scheme):
        raise ArgumentError(f"{call} takes a stores.Scheme(...), not {type(scheme).__name__}")
    if not callable(scheme.open):
        raise ArgumentError(
            f"{call}: Scheme(open=...) must be a function of (url, options, policy), not {scheme.open!r}"
        )
    for field, words in (("host", get_args(HostPart)), ("user", get_args(UserPart))):
        check_one_of(f"{call}: Scheme({field}=...)", getattr(scheme, field), words)


def unregister_scheme(name: str) -> None:
    """Remove a registered scheme; ArgumentError if it is not registered."""
    if name not in _added:
        raise ArgumentError(f"unregister_scheme({name!r}): no such scheme was registered; there are {sorted(_added)}")
    del SCHEMES[name], _added[name]


class RegisteredSchemes:
    """The registered schemes; unpickling registers them in the other process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _register_all, (dict(_added),)


def registered_schemes() -> RegisteredSchemes | None:
    """The registered schemes for another process; None without any.

    Pickle this value before objects that open stores.
    """
    return RegisteredSchemes() if _added else None


def _register_all(schemes: dict[str, Scheme]) -> RegisteredSchemes:
    for name, scheme in schemes.items():
        register_scheme(name, scheme)
    return RegisteredSchemes()
