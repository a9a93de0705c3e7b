"""The objects that addresses stand for, with their sizes and versions, at the price of few requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

from feedline.cancelling import DaemonPool
from feedline.stores.addresses import join, refuse_secrets, scheme_of, split
from feedline.stores.cache import Cache
from feedline.stores.opening import open_store
from feedline.stores.patterns import MAGIC, braces, candidates, matcher
from feedline.stores.problems import ObjectNotFoundError
from feedline.stores.protocol import ObjectInfo, Store

_ASKED_AT_ONCE = 32
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
        with DaemonPool(_ASKED_AT_ONCE) as pool:
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
                if scheme_of(store.url).startswith("http"):
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
    if len(paths) < worth or scheme_of(store.url).startswith("http"):
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
