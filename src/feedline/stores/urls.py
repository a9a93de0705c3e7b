"""Addresses: parsed into store and path without I/O, never with credentials."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from feedline.core.paths import Pathlike, expand_user
from feedline.errors import ArgumentError
from feedline.stores.links import as_link, decoded, shown, split_link, unsigned
from feedline.stores.schemes import OTHERS, SCHEMES, Scheme

_SIGNED = re.compile(r"[?&](x-amz-|x-goog-|awsaccesskeyid=|signature=|sig=|token=)", re.IGNORECASE)
"""Signatures in an address: names of objects may hold question marks, but not followed by these."""


class Location(NamedTuple):
    """An object: the address of its store (`root`), and its path there."""

    root: str
    path: str


def scheme_of(address: Pathlike) -> str:
    """The part before `://` in lower case; "file" without one."""
    scheme, mark, _ = os.fspath(address).partition("://")
    return scheme.lower() if mark else "file"


def is_local(address: Pathlike) -> bool:
    """True if an address is a path of this machine."""
    return scheme_of(address) == "file"


def scheme_row(address: Pathlike) -> Scheme:
    """The properties of an address's scheme."""
    return SCHEMES.get(scheme_of(address)) or SCHEMES[OTHERS]


def split(address: Pathlike) -> Location:
    """Split an address into store and object; local paths become absolute.

    `split("s3://bucket/train/0.tar")` is `("s3://bucket", "train/0.tar")`. Objects of one bucket or server share a
    root, and all local files have `/`. `%20` in the address of a web server is a space; `%2F` and `%2B` are other
    characters than `/` and `+`. The path of a link with a query contains the query, which `join` does not show.
    ArgumentError for credentials in the address, or for no bucket or server.
    """
    check_no_secrets(address, is_object=True)
    if is_local(address):
        path = os.path.abspath(local_path(address))  # noqa: PTH100 - links are kept as they are
        return Location("/", path.lstrip("/"))
    scheme, row = scheme_of(address), scheme_row(address)
    rest = os.fspath(address).partition("://")[2]
    host, slash, path = rest.partition("/")
    if row.host == "none" or (row.host == "optional" and not slash):
        host, path = "", rest
    elif row.host == "required" and not host:
        raise ArgumentError(f"{os.fspath(address)} names no bucket or server: {scheme}://NAME/path is expected")
    if not row.links:
        return Location(f"{scheme}://{host}", unquote(path) if row.quoted else path)
    name, _, query = path.partition("?")
    return Location(f"{scheme}://{host}", as_link(decoded(name), query))


def split_query(address: str) -> tuple[str, str]:
    """An address without its query, and the query with its question mark.

    Only addresses of web servers have one.
    """
    if not scheme_row(address).links:
        return address, ""
    plain, mark, query = address.partition("?")
    return plain, mark + query


def check_no_secrets(address: Pathlike, *, is_object: bool = False) -> None:
    """Raise ArgumentError if an address contains credentials.

    The message does not show them.

    Patterns of addresses are checked in the same way. Links to an object of a web server may have a query.
    """
    if is_local(address):
        return
    scheme, row = scheme_of(address), scheme_row(address)
    host, _, path = os.fspath(address).partition("://")[2].partition("/")
    user, at, host = host.rpartition("@")
    if at and (row.user == "refused" or (row.user == "name" and ":" in user)):
        raise ArgumentError(
            f"an address {scheme}://...@{host}/ contains credentials, which every message about it would show; give "
            "them through the environment, or as options={...}"
        )
    if row.links and is_object:
        return
    if (row.quoted and "?" in path) or _SIGNED.search(path):
        raise ArgumentError(
            f"{scheme}://{host}/{path.partition('?')[0]} is followed by a query, which may be a signature that grants "
            "access to one object. Pass such a link to a dataset unchanged, with https://, or open the bucket itself "
            "(s3://, gs://, az://) with credentials from the environment. In a name, write a question mark as %3F"
        )


def local_path(address: Pathlike) -> str:
    """The path in the address of a local file, `~` expanded.

    After `file://` it is percent-quoted.
    """
    path = os.fspath(address)
    return expand_user(unquote(path[len("file://") :]) if path[: len("file://")].lower() == "file://" else path)


def join(root: str, path: str) -> str:
    """The address of an object; the inverse of `split`.

    The query of a link is left out, because it may be a secret.
    """
    if scheme_row(root).quoted:
        name, query = split_link(unsigned(path))
        path = shown(name) + (f"?{query}" if split_link(path)[1] else "")
    return f"{root}{path}" if root.endswith("/") else f"{root}/{path}" if path else root


def check_path(path: str) -> str:
    """The path of an object, validated.

    ArgumentError for a path out of the store.
    """
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ArgumentError(
            f"{split_link(path)[0]!r} is not a path within a store: it may not begin with / or contain .."
        )
    return path


def absolute(address: Pathlike) -> str:
    """The address, independent of the working directory."""
    if not is_local(address):
        return os.fspath(address)
    return str(Path(os.path.abspath(local_path(address))))  # noqa: PTH100 - see split
