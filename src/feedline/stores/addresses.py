"""Addresses: where a store begins and which object is meant, without asking anybody, and without telling secrets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

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
    root, all local files have `/`, and for schemes that fsspec reads all is path behind `scheme://`.
    """
    scheme = scheme_of(address)
    if scheme == "file":
        path = os.path.abspath(os.fspath(address).removeprefix("file://"))  # noqa: PTH100 - links are kept as they are
        return Location("/", path.lstrip("/"))
    rest = os.fspath(address).partition("://")[2]
    if scheme not in SCHEMES:
        return Location(f"{scheme}://", rest)
    host, _, path = rest.partition("/")
    _refuse_secrets(scheme, host, path)
    if not host:
        raise ArgumentError(f"{os.fspath(address)} names no bucket or server: {scheme}://NAME/path is expected")
    return Location(f"{scheme}://{host}", path)


def _refuse_secrets(scheme: str, host: str, path: str) -> None:
    if "@" in host and not scheme.startswith("abfs"):
        raise ArgumentError(
            f"an address {scheme}://...@{host.rpartition('@')[2]}/ carries credentials, which would show wherever it "
            "is named; give them through the environment, or as options={...}"
        )
    if scheme.startswith("http") and "?" in path:
        raise ArgumentError(
            f"{scheme}://{host}/{path.partition('?')[0]} is followed by a query, which may be a signature that lets "
            "anybody in; open the bucket itself (s3://, gs://, az://) with credentials from the environment"
        )


def join(root: str, path: str) -> str:
    """The address of an object, as it is told to people."""
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
    return str(Path(os.path.abspath(os.fspath(address).removeprefix("file://"))))  # noqa: PTH100 - see split
