"""Addresses: where a store begins and which object is meant, without asking anybody, and without telling secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from feedline.core.paths import expanded
from feedline.errors import ArgumentError

Address = str | os.PathLike[str]


SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "http": "http",
    "https": "https",
}
"""What obstore reads, and the kind of store behind each scheme."""


_HOSTLESS = frozenset({"hf", "memory"})
"""Schemes of fsspec without a server or bucket before the first slash."""


_SIGNED = re.compile(r"[?&](x-amz-|x-goog-|awsaccesskeyid=|signature=|sig=|token=)", re.IGNORECASE)
"""Objects of a bucket may have question marks in their names, but not these behind them."""


class Location(NamedTuple):
    """`root` is the address of a store, `path` an object in it."""

    root: str
    path: str


def scheme_of(address: Address) -> str:
    """The part before `://`, in small letters; "file" for what has none."""
    scheme, mark, _ = os.fspath(address).partition("://")
    return scheme.lower() if mark else "file"


def split(address: Address) -> Location:
    """The store and the object that an address means; a local path is made absolute.

    `split("s3://bucket/train/0.tar")` is `("s3://bucket", "train/0.tar")`. Objects of one bucket or server share a
    root, and all local files have `/`. What a browser writes as `%20` in an address of a web server is a space.
    """
    refuse_secrets(address)
    scheme = scheme_of(address)
    if scheme == "file":
        path = os.path.abspath(local_path(address))  # noqa: PTH100 - links are kept as they are
        return Location("/", path.lstrip("/"))
    rest = os.fspath(address).partition("://")[2]
    host, slash, path = rest.partition("/")
    if scheme not in SCHEMES:
        return (
            Location(f"{scheme}://", rest) if scheme in _HOSTLESS or not slash else Location(f"{scheme}://{host}", path)
        )
    if not host:
        raise ArgumentError(f"{os.fspath(address)} names no bucket or server: {scheme}://NAME/path is expected")
    return Location(f"{scheme}://{host}", unquote(path) if scheme.startswith("http") else path)


def refuse_secrets(address: Address) -> None:
    """ArgumentError for an address, or a pattern of addresses, that carries credentials; it does not show them."""
    scheme = scheme_of(address)
    if scheme == "file":
        return
    host, _, path = os.fspath(address).partition("://")[2].partition("/")
    user, at, host = host.rpartition("@")
    if at and (scheme in SCHEMES or ":" in user) and not scheme.startswith("abfs") and scheme != "github":
        raise ArgumentError(
            f"an address {scheme}://...@{host}/ carries credentials, which would show wherever it is named; give them "
            "through the environment, or as options={...}"
        )
    if (scheme.startswith("http") and "?" in path) or _SIGNED.search(path):
        raise ArgumentError(
            f"{scheme}://{host}/{path.partition('?')[0]} is followed by a query, which may be a signature that lets "
            "anybody in; open the bucket itself (s3://, gs://, az://) with credentials from the environment. In a name "
            "a question mark is written %3F"
        )


def local_path(address: Address) -> str:
    """The path in the address of a local file, its `~` written out; behind `file://` it is quoted as in a browser."""
    path = os.fspath(address)
    return expanded(unquote(path[len("file://") :]) if path[: len("file://")].lower() == "file://" else path)


def join(root: str, path: str) -> str:
    """The address of an object, as it is told to people, and as `split` takes it apart again."""
    if root.startswith(("http://", "https://")):
        path = path.replace("%", "%25").replace("?", "%3F")
    return f"{root}{path}" if root.endswith("/") else f"{root}/{path}" if path else root


def checked(path: str) -> str:
    """The path of an object within a store; ArgumentError for one that would lead out of it."""
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ArgumentError(f"{path!r} is no path within a store: it may not begin with / or contain ..")
    return path


def absolute(address: Address) -> str:
    """The address such that it means the same in another working directory."""
    if scheme_of(address) != "file":
        return os.fspath(address)
    return str(Path(os.path.abspath(local_path(address))))  # noqa: PTH100 - see split
