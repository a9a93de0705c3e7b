"""Folders of shards with an index that names them: on this machine, or in a store.

What an index of shards promises, read without trust: numbers that can be, names that stay within the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from feedline.core.paths import missing
from feedline.core.threads import DaemonPool
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.stores import Cache, ObjectInfo, ObjectNotFoundError, Store, open_store
from feedline.stores.open import list_below
from feedline.stores.urls import is_local, join, local_path


class Found(NamedTuple):
    """A file of a folder; `info` is what a store tells of it."""

    name: str
    info: ObjectInfo | None = None


class IndexedFolder:
    """A folder whose index names its files. Safe to use from several threads; pickles by path or address."""

    def __init__(
        self,
        path: Pathlike,
        *,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        text = os.fspath(path)
        self.store: Store | None = None
        """Where it lies, if not on this machine."""
        if is_local(text):
            self.name = str(Path(local_path(text)).resolve())
        else:
            kept = Path(cache) if isinstance(cache, os.PathLike) else cache
            self.store = open_store(text.rstrip("/"), options=options, cache=kept)
            self.name = self.store.url

    def where(self, name: str) -> str:
        """The path or address of a file, as people are told."""
        return join(self.name, name)

    def index(self, what: str) -> bytes:
        """The content of `index.json`; FileNotFoundError says that this is no `what`."""
        place = self.where("index.json")
        try:
            if self.store is None:
                return Path(place).read_bytes()
            return bytes(self.store.read("index.json"))
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(f"no {what}: {place} does not exist ({error})") from error
        except (FileNotFoundError, NotADirectoryError):
            said = f"no {what}: {place} does not exist (give the folder that it is in)"
            raise ObjectNotFoundError(said) if Path(self.name).is_dir() else missing(self.name, said) from None

    def files(self, several: Sequence[Sequence[str]]) -> list[Found]:
        """For each, the first of these files, in order of preference, that is there; objects by few requests.

        A file of this machine that is missing is found so when it is opened, an object here: ObjectNotFoundError.
        """
        if self.store is None:
            return [Found(self._first_file(names)) for names in several]
        known = self._listed([name for names in several for name in names])
        with DaemonPool(thread_name_prefix="feedline-folder") as pool:
            return list(pool.map(partial(self._first_object, known), several))

    def _first_file(self, names: Sequence[str]) -> str:
        there = (name for name in names if Path(self.name, name).exists())
        return names[0] if len(names) == 1 else next(there, names[0])

    def _listed(self, names: Sequence[str]) -> Mapping[str, ObjectInfo] | None:
        """The objects in the folder, or None where it is better to ask for each."""
        return None if self.store is None else list_below(self.store, names)

    def _first_object(self, known: Mapping[str, ObjectInfo] | None, names: Sequence[str]) -> Found:
        assert self.store is not None
        for name in names:
            with suppress(ObjectNotFoundError):
                info = self.store.info(name) if known is None else known.get(name)
                if info is not None:
                    return Found(name, info)
        return Found(names[-1], self.store.info(names[-1]))


_MOST = 1 << 63


def count(told: Any, what: str) -> int:
    """A number of samples, bytes or tokens; ValueError if it is none."""
    if type(told) is not int or not 0 <= told < _MOST:
        raise ValueError(f"{what} is {told!r}")
    return told


def samples(told: Any, nbytes: int, what: str) -> int:
    """The number of samples of a shard of `nbytes`, in which each has an offset of four bytes."""
    found = count(told, what)
    if 4 * found > nbytes:
        raise ValueError(f"{what} is {found}, in {nbytes} bytes")
    return found


def refuse_overflow(several: Iterable[int]) -> None:
    """ValueError if all shards together hold more samples than can be counted."""
    count(sum(several), "the number of all samples")


def file_name(told: Any) -> str:
    """The name of a file within the folder, or within folders of it; ValueError for any other."""
    name = str(told)
    if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"the file name {name!r} leads out of the folder")
    if "\0" in name:
        raise ValueError(f"no file can have the name {name!r}")
    return name
