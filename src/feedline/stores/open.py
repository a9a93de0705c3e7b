"""One way to open every store.

The objects that addresses stand for, with their sizes and versions, at the price of few requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeVar

from feedline.core.threads import DaemonPool
from feedline.errors import ArgumentError, MissingExtraError, ObjectNotFoundError
from feedline.stores import globs
from feedline.stores.base import ObjectInfo, Store
from feedline.stores.cache import Cache, CachedStore
from feedline.stores.fsspec import ForeignStore
from feedline.stores.globs import MAGIC, braces, candidates, matcher
from feedline.stores.local import LocalStore
from feedline.stores.object_store import RemoteStore
from feedline.stores.obstore_client import AZURE, GOOGLE, S3, WEB, ObstoreKind
from feedline.stores.options import StoreOptions, refuse_untyped
from feedline.stores.requests import Requests
from feedline.stores.retry import Retry
from feedline.stores.schemes import OTHERS, SCHEMES, Scheme, StorePolicy
from feedline.stores.urls import Address, absolute, join, refuse_secrets, scheme_row, split

Setting = TypeVar("Setting", Retry, Requests)


def open_store(
    address: Address,
    *,
    options: Mapping[str, Any] | None = None,
    retry: Retry | None = None,
    requests: Requests | None = None,
    cache: Cache | str | Path | None = None,
) -> Store:
    """The store at an address: a folder, a bucket or server, or a prefix of one; paths are relative to it.

    `s3://`, `gs://`, `az://`, `http://` and `https://` are read by obstore, every other scheme by fsspec; neither is
    asked for anything yet. Credentials come from the environment, as each cloud's own tools read them, or from
    `options`, the names of which are obstore's (or, for fsspec's schemes, the file system's). There `retry` and
    `requests` may stand, too, which is how a dataset, that opens its stores itself, is given them. With `cache`, what
    is read is kept in a folder of this machine.
    """
    given = _named(options)
    retry = _policy("retry", Retry, retry, given)
    requests = _policy("requests", Requests, requests, given)
    store = _open(address, StoreOptions(given), StorePolicy(retry, requests))
    if cache is None:
        return store
    return CachedStore(store, cache if isinstance(cache, Cache) else Cache(cache))


def _named(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(f"options= takes a dictionary, not {type(options).__name__}")
    return dict(options or {})


def _policy(name: str, kind: type[Setting], given: Setting | None, options: dict[str, Any]) -> Setting:
    """How a store is asked: given by itself, or taken out of the options."""
    if given is not None and name in options:
        raise ArgumentError(f"{name} is given twice: by itself, and in options={{...}}")
    policy = options.pop(name, given)
    if policy is not None and not isinstance(policy, kind):
        raise ArgumentError(f"{name} takes a stores.{kind.__name__}(...), not {type(policy).__name__}")
    return kind() if policy is None else policy


def _open(address: Address, options: StoreOptions, policy: StorePolicy) -> Store:
    refuse_secrets(address)
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
    refuse_untyped(options, root)
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
_WEB = Scheme(partial(_open_with_obstore, WEB), user="refused", lists=False, quoted=True)
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


def expand(addresses: Address | Sequence[Address], *, options: Mapping[str, Any] | None = None) -> list[str]:
    """The addresses that patterns with braces and globs stand for, in the order given; those of one glob are sorted.

    `s3://bucket/{train,val}-{000..127}.tar` is expanded without a request; `*`, `**`, `?` and `[...]` take one listing
    each. ObjectNotFoundError names a glob that matches nothing.
    """
    return globs.expand(addresses, lambda root: open_store(root, options=options))


_WORTH_LISTING = 64
"""From so many objects on, one listing of the folder that they have in common is tried before each is asked for."""


_WORTH_LISTING_ALL = 1024
"""So many where it would be a listing of the whole bucket."""


class Finder:
    """Finds objects by address; those of one bucket or server share a store."""

    def __init__(self, cache: Cache | str | Path | None, options: Mapping[str, Any] | None) -> None:
        self._cache, self._options = cache, options
        self._stores: dict[str, Store] = {}

    def found(self, address: str, inside: str) -> list[tuple[Store, ObjectInfo]]:
        """What an address, a pattern or a folder means; of a folder, the objects in it that match `inside`.

        In the order in which braces are written out; those of one glob or folder sorted. ObjectNotFoundError names
        what is not there.
        """
        refuse_secrets(address)  # before it is quoted
        plain = [split(each) for each in braces(address)]
        if len({root for root, _ in plain}) == 1 and not any(MAGIC.search(path) for _, path in plain):
            store = self._store(plain[0].root)
            return [(store, info) for info in self._named(store, [path for _, path in plain], inside)]
        return [
            (self._store(root), info)
            for root, path in plain
            for info in (
                self._matching(self._store(root), path)
                if MAGIC.search(path)
                else self._named(self._store(root), [path], inside)
            )
        ]

    def _store(self, root: str) -> Store:
        if root not in self._stores:  # of two threads that come first, both get the store of one
            self._stores.setdefault(root, open_store(root, options=self._options, cache=self._cache))
        return self._stores[root]

    def _matching(self, store: Store, pattern: str) -> list[ObjectInfo]:
        matches = _matcher(pattern)
        infos = [info for info in candidates(store, pattern) if matches(info.path)]
        if not infos:
            raise ObjectNotFoundError(f"{join(store.url, pattern)}: nothing matches")
        return infos

    def _named(self, store: Store, paths: Sequence[str], inside: str) -> Iterator[ObjectInfo]:
        is_folder = "/" in commonprefix(paths)  # noqa: RUF071 - of names
        known = listed(store, paths, _WORTH_LISTING if is_folder else _WORTH_LISTING_ALL) or {}
        with DaemonPool() as pool:
            asked = [
                [known[path]] if path in known else pool.submit(self._asked, store, path, inside) for path in paths
            ]
            for each in asked:
                yield from each if isinstance(each, list) else each.result()

    def _asked(self, store: Store, path: str, inside: str) -> list[ObjectInfo]:
        """One object, or those in a folder."""
        if path and not path.endswith("/"):
            try:
                return [store.info(path)]
            except ObjectNotFoundError:
                if not scheme_row(store.url).lists:
                    raise
                folder = f"{path}/"
                infos = _inside(store, folder, inside)
                if not infos:
                    raise
                return infos
        infos = _inside(store, path, inside)
        if not infos:
            raise ObjectNotFoundError(f"{join(store.url, path)}: nothing in there matches {inside}")
        return infos


def listed(store: Store, paths: Sequence[str], worth: int = _WORTH_LISTING) -> dict[str, ObjectInfo] | None:
    """The objects below what these paths have in common; None where it is better to ask for each."""
    if len(paths) < worth or not scheme_row(store.url).lists:
        return None
    return {info.path: info for info in store.list(commonprefix(paths))}  # noqa: RUF071 - of names


def _inside(store: Store, folder: str, inside: str) -> list[ObjectInfo]:
    matches = _matcher(inside)
    listed = candidates(store, folder + inside)
    infos = (info for info in listed if info.path != folder)  # what stands for the folder itself
    return [info for info in infos if matches(info.path.removeprefix(folder))]


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a path matches; as for files, what begins with a dot only if the pattern says so: indexes are hidden."""
    matches, hidden = matcher(pattern), "/." in f"/{pattern}"
    return lambda path: matches(path) and (hidden or "/." not in f"/{path}")
