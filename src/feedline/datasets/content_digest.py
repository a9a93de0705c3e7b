"""Digests of file and object contents from names, sizes, times and versions.

The contents themselves are not read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from feedline.core.paths import files_below
from feedline.core.threads import DaemonPool
from feedline.datasets.file_root import FileRoot
from feedline.errors import ArgumentError
from feedline.stores import ObjectInfo, ObjectNotFoundError, Store
from feedline.stores.base import FileVersion
from feedline.stores.links import unsigned
from feedline.stores.open import list_below
from feedline.stores.urls import join


def digest_below(root: FileRoot, paths: Sequence[str]) -> str:
    """Digest of files below a local or remote root."""
    if root.store is None:
        return digest_of_files(os.path.join(root.name, path) for path in paths)  # noqa: PTH118 - millions of them
    return digest_of_objects(root.store, paths)


def digest_of_files(paths: Iterable[str]) -> str:
    """Digest of files by path, with one `stat` each.

    A million files take seconds on a local disk and minutes on a file server.
    """
    return _digest((path, _version_of_file(path)) for path in paths)


def digest_of_folder(folder: str) -> str:
    """Digest of a file, or of all files below a folder."""
    return digest_of_files(sorted(files_below(folder)) if Path(folder).is_dir() else [folder])


def digest_of_objects(store: Store, paths: Sequence[str] | None = None) -> str:
    """Digest of objects, by default of all objects in the store.

    ArgumentError names an object without a version. A few objects are looked up concurrently; many are found by one
    listing.
    """
    infos = store.list() if paths is None else _infos(store, paths)
    return _digest((info.path, versioned(info, store.url).version) for info in infos)


def versioned(info: ObjectInfo, url: str = "") -> ObjectInfo:
    """Return `info`; ArgumentError if changes of its content cannot be detected."""
    if not info.is_versioned:
        name = join(url, info.path) if url else info.path
        raise ArgumentError(
            f"the store has no version of {name}, so a cached result could belong to former content of the object."
            " Leave out index_dir= of Filter, use Map instead of CachedMap, or copy the data to a store with versions"
        )
    return info


def _digest(versions: Iterable[tuple[str, str]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, version in versions:
        digest.update(f"{unsigned(name)}\0{version}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _version_of_file(path: str) -> str:
    try:
        return FileVersion.of(os.stat(path)).tag  # noqa: PTH116 - millions of them
    except (OSError, ValueError):
        return "not there"  # reading it raises the error


def _infos(store: Store, paths: Sequence[str]) -> Iterator[ObjectInfo]:
    known = list_below(store, paths) or {}
    with DaemonPool() as pool:
        left = [path for path in paths if path not in known]
        asked = dict(zip(left, pool.map(lambda path: _info(store, path), left), strict=True))
        yield from (known.get(path) or asked[path] for path in paths)


def _info(store: Store, path: str) -> ObjectInfo:
    try:
        return store.info(path)
    except (ObjectNotFoundError, ArgumentError):  # also raised for a path out of the store
        return ObjectInfo(path, 0, "not there")
