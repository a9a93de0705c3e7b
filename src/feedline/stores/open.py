"""Opening stores by address, and resolving addresses to objects."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from feedline.core.paths import Pathlike
from feedline.core.threads import DaemonPool
from feedline.errors import ArgumentError, MissingExtraError, ObjectNotFoundError
from feedline.stores import globs
from feedline.stores.base import ObjectInfo, Store
from feedline.stores.cache import Cache, CachedStore
from feedline.stores.fsspec import ForeignStore
from feedline.stores.globs import MAGIC, braces, candidates, expand_address, first_forms, matcher, matching_objects
from feedline.stores.links import split_link
from feedline.stores.local import LocalStore
from feedline.stores.object_store import RemoteStore
from feedline.stores.obstore_client import AZURE, GOOGLE, S3, WEB, ObstoreKind
from feedline.stores.options import StoreOptions, check_option_types
from feedline.stores.requests import Requests
from feedline.stores.retry import Retry
from feedline.stores.schemes import OTHERS, SCHEMES, Scheme, StorePolicy
from feedline.stores.urls import absolute, check_no_secrets, join, scheme_row, split

Setting = TypeVar("Setting", Retry, Requests)


def open_store(
    address: Pathlike,
    *,
    options: Mapping[str, Any] | None = None,
    retry: Retry | None = None,
    requests: Requests | None = None,
    cache: Cache | Pathlike | None = None,
) -> Store:
    """Open the store at an address: a folder, bucket, server, or prefix.

    Paths are relative to that address. `s3://`, `gs://`, `az://`, `http://` and `https://` are read by obstore, schemes
    of `register_scheme` by their own stores, all others by fsspec. No request is sent yet. Credentials come from the
    environment, as for each cloud's own tools, or from `options`. Options have the names of obstore or, for schemes of
    fsspec, of the file system. `retry` and `requests` may be among the options, too, so that they apply to stores that
    datasets open. With `cache`, the data read is kept in a folder of this machine. ArgumentError for wrong options, an
    unknown scheme, or credentials in the address; MissingExtraError for a package that is not installed.
    """
    settings = _as_dict(options)
    retry = _policy("retry", Retry, retry, settings)
    requests = _policy("requests", Requests, requests, settings)
    store = _open(address, StoreOptions(settings), StorePolicy(retry, requests))
    if cache is None:
        return store
    return CachedStore(store, cache if isinstance(cache, Cache) else Cache(os.fspath(cache)))


def _as_dict(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(f"options= takes a dictionary, not {type(options).__name__}")
    return dict(options or {})


def _policy(name: str, kind: type[Setting], value: Setting | None, options: dict[str, Any]) -> Setting:
    """A policy, passed separately or among the options."""
    if value is not None and name in options:
        raise ArgumentError(f"{name} is given twice: by itself, and in options={{...}}")
    policy = options.pop(name, value)
    if policy is not None and not isinstance(policy, kind):
        raise ArgumentError(f"{name} takes a stores.{kind.__name__}(...), not {type(policy).__name__}")
    return kind() if policy is None else policy


def _open(address: Pathlike, options: StoreOptions, policy: StorePolicy) -> Store:
    check_no_secrets(address)
    row = scheme_row(address)
    try:
        return row.open(absolute(address), options, policy)
    except ModuleNotFoundError as error:
        if row.install is None:
            raise
        raise MissingExtraError(
            f"the store {absolute(address)} needs {error.name}, which is not installed: pip install {row.install!r}"
        ) from error


def _open_folder(url: str, options: StoreOptions, _: StorePolicy) -> Store:
    if options:
        raise ArgumentError(f"{url} is a folder of this machine, which takes no options")
    return LocalStore(url)


def _open_with_obstore(kind: ObstoreKind, url: str, options: StoreOptions, policy: StorePolicy) -> Store:
    root, prefix = split(url)
    check_option_types(options, root)
    return RemoteStore(kind, root, prefix, options, *policy)


def _open_with_fsspec(url: str, options: StoreOptions, policy: StorePolicy) -> Store:
    return ForeignStore(url, options, *policy)


_S3 = Scheme(partial(_open_with_obstore, S3), user="refused", credentials="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
_GOOGLE = Scheme(
    partial(_open_with_obstore, GOOGLE),
    user="refused",
    credentials="GOOGLE_APPLICATION_CREDENTIALS, the path of a JSON file",
)
_AZURE = Scheme(
    partial(_open_with_obstore, AZURE),
    user="refused",
    credentials="AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
)
_AZURE_FILES = replace(_AZURE, user="any")  # abfss://container@account.dfs.core.windows.net
_WEB = Scheme(partial(_open_with_obstore, WEB), user="refused", lists=False, quoted=True, links=True)
_FSSPEC = Scheme(_open_with_fsspec, host="optional")

SCHEMES.update(
    {
        "file": Scheme(_open_folder, host="none"),
        "s3": _S3,
        "s3a": _S3,
        "gs": _GOOGLE,
        "gcs": _GOOGLE,
        "az": _AZURE,
        "azure": _AZURE,
        "abfs": _AZURE_FILES,
        "abfss": _AZURE_FILES,
        "http": _WEB,
        "https": _WEB,
        "hf": replace(_FSSPEC, host="none"),
        "memory": replace(_FSSPEC, host="none"),
        "github": replace(_FSSPEC, user="any"),  # github://owner:repository@branch
        OTHERS: _FSSPEC,
    }
)


def expand(addresses: Pathlike | Sequence[Pathlike], *, options: Mapping[str, Any] | None = None) -> list[str]:
    """Expand patterns with braces and globs into addresses, in order.

    The matches of one glob are sorted. `s3://bucket/{train,val}-{000..127}.tar` is expanded without a request; `*`,
    `**`, `?` and `[...]` take one listing each, and match a leading dot only explicitly. A glob that is the name of an
    object stands for that object. ObjectNotFoundError names a glob that matches nothing.
    """
    return globs.expand(addresses, lambda root: open_store(root, options=options))


_WORTH_LISTING = 64
"""Least number of objects for which one listing of their common folder replaces a request for each."""


_WORTH_LISTING_ALL = 1024
"""The same number if the listing would be of the whole bucket."""


class Finder:
    """Resolves addresses to objects; one store per bucket or server."""

    def __init__(self, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None) -> None:
        self._cache, self._options = cache, options
        self._stores: dict[str, Store] = {}

    def resolve(self, address: str, inside: str) -> list[tuple[Store, ObjectInfo]]:
        """The objects that an address, pattern or folder stands for.

        For a folder, these are the objects in it that match `inside`, which may have braces: see `first_forms`. Objects
        are in the order in which braces are expanded; the objects of one glob or folder are sorted. ObjectNotFoundError
        names a missing object, or a pattern or folder without matches.
        """
        check_no_secrets(address, is_object=True)  # before any message shows it
        plain = [split(each) for each in expand_address(address)]
        if len({root for root, _ in plain}) == 1 and not any(MAGIC.search(split_link(path)[0]) for _, path in plain):
            store = self._store(plain[0].root)
            return [(store, info) for info in self._resolve_paths(store, [path for _, path in plain], inside)]
        return [
            (self._store(root), info)
            for root, path in plain
            for info in (
                self._match(self._store(root), path, inside)
                if MAGIC.search(split_link(path)[0])
                else self._resolve_paths(self._store(root), [path], inside)
            )
        ]

    def _store(self, root: str) -> Store:
        if root not in self._stores:  # two threads at the same time get the same store
            self._stores.setdefault(root, open_store(root, options=self._options, cache=self._cache))
        return self._stores[root]

    def _match(self, store: Store, pattern: str, inside: str) -> list[ObjectInfo]:
        """The object or folder of exactly that name, or else the matches."""
        infos = matching_objects(store, pattern, matcher(pattern))
        if not infos and scheme_row(store.url).lists:
            infos = _objects_in(store, f"{pattern.rstrip('/')}/", inside)
        if not infos:
            raise ObjectNotFoundError(f"{join(store.url, pattern)}: nothing matches")
        return infos

    def _resolve_paths(self, store: Store, paths: Sequence[str], inside: str) -> Iterator[ObjectInfo]:
        is_folder = "/" in os.path.commonprefix(paths)  # noqa: RUF071 - of names
        known = list_below(store, paths, _WORTH_LISTING if is_folder else _WORTH_LISTING_ALL) or {}
        with DaemonPool() as pool:
            futures = [
                [known[path]] if path in known else pool.submit(self._resolve, store, path, inside) for path in paths
            ]
            for each in futures:
                yield from each if isinstance(each, list) else each.result()

    def _resolve(self, store: Store, path: str, inside: str) -> list[ObjectInfo]:
        """One object, or the objects in a folder."""
        if path and not path.endswith("/"):
            try:
                return [store.info(path)]
            except ObjectNotFoundError:
                if not scheme_row(store.url).lists:
                    raise
                folder = f"{path}/"
                infos = _objects_in(store, folder, inside)
                if not infos:
                    raise
                return infos
        infos = _objects_in(store, path, inside)
        if not infos:
            raise ObjectNotFoundError(f"{join(store.url, path)}: no object in it matches {inside}")
        return infos


def list_below(store: Store, paths: Sequence[str], worth: int = _WORTH_LISTING) -> dict[str, ObjectInfo] | None:
    """The objects below the common prefix of `paths`, by path.

    None if a request for each of them is cheaper than a listing.
    """
    if len(paths) < worth or not scheme_row(store.url).lists:
        return None
    return {info.path: info for info in store.list(os.path.commonprefix(paths))}  # noqa: RUF071 - of names


def _objects_in(store: Store, folder: str, inside: str) -> list[ObjectInfo]:
    matchers = [matcher(each) for each in braces(inside)]
    start, brace, rest = inside.partition("{")
    listed = candidates(store, start + ("**" if "/" in rest else "*") if brace else inside, folder)
    infos = {info.path: info for info in listed if info.path != folder}  # without the marker of the folder itself
    names = [path for path in infos if any(matches(path.removeprefix(folder)) for matches in matchers)]
    return [infos[path] for path in first_forms(names, inside)]
