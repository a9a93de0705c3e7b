"""Folders of shards with an `index.json`, local or in a store.

Indexes are untrusted: numbers must be possible, and file names must stay within the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from feedline.core.paths import Pathlike, missing_error
from feedline.core.threads import DaemonPool
from feedline.stores import Cache, ObjectInfo, ObjectNotFoundError, Store, open_store
from feedline.stores.files import local_info
from feedline.stores.open import list_below
from feedline.stores.urls import is_local, join, local_path


class FolderFile(NamedTuple):
    """File of a folder; without `info`, one that is missing."""

    name: str
    info: ObjectInfo | None = None


class IndexedFolder:
    """Folder whose `index.json` lists its files.

    Safe to use from several threads; pickles by path or address.
    """

    def __init__(
        self,
        path: Pathlike,
        *,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        text = os.fspath(path)
        self.store: Store | None = None
        """Store of the folder; None for a local one."""
        if is_local(text):
            self.name = str(Path(local_path(text)).resolve())
        else:
            self.store = open_store(text.rstrip("/"), options=options, cache=cache)
            self.name = self.store.url

    def where(self, name: str) -> str:
        """Path or address of a file of the folder."""
        return join(self.name, name)

    def nbytes(self, file: FolderFile) -> int:
        """The size of a file of the folder."""
        return Path(self.where(file.name)).stat().st_size if file.info is None else file.info.size

    def index(self, what: str) -> bytes:
        """Content of `index.json`.

        If it does not exist, ObjectNotFoundError with the words "no `what`".
        """
        place = self.where("index.json")
        try:
            if self.store is None:
                return Path(place).read_bytes()
            return bytes(self.store.read("index.json"))
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(f"no {what}: {place} does not exist ({error})") from error
        except (FileNotFoundError, NotADirectoryError):
            message = f"no {what}: {place} does not exist (pass the folder that it is in)"
            raise (
                ObjectNotFoundError(message) if Path(self.name).is_dir() else missing_error(self.name, message)
            ) from None

    def files(self, several: Sequence[Sequence[str]]) -> list[FolderFile]:
        """First existing file of each group of names, in order of preference.

        Objects are looked up in few requests.
        """
        if self.store is None:
            return [self._first(self._info, names) for names in several]
        known = list_below(self.store, [name for names in several for name in names])
        look_up = self._info if known is None else known.get
        with DaemonPool(thread_name_prefix="feedline-folder") as pool:
            return list(pool.map(partial(self._first, look_up), several))

    def _first(self, look_up: Callable[[str], ObjectInfo | None], names: Sequence[str]) -> FolderFile:
        found = ((name, info) for name in names if (info := look_up(name)) is not None)
        return FolderFile(*next(found, (names[0], None)))

    def _info(self, name: str) -> ObjectInfo | None:
        with suppress(FileNotFoundError, NotADirectoryError):  # FileNotFoundError is the base of ObjectNotFoundError
            return local_info(self.where(name)) if self.store is None else self.store.info(name)
        return None


_LIMIT = 1 << 63


def check_count(value: Any, what: str) -> int:
    """Return a number of samples, bytes or tokens; ValueError if invalid."""
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise ValueError(f"{what} is {value!r}")
    return value


def check_samples(value: Any, nbytes: int, what: str) -> int:
    """Return the number of samples of a shard; ValueError if invalid.

    In a shard of `nbytes`, each sample takes at least the four bytes of its offset.
    """
    samples = check_count(value, what)
    if 4 * samples > nbytes:
        raise ValueError(f"{what} is {samples}, in {nbytes} bytes")
    return samples


def check_total(counts: Iterable[int]) -> None:
    """Raise ValueError if the shards have too many samples to count."""
    check_count(sum(counts), "the number of all samples")


_MOST_NAME_NBYTES = 255


def check_file_name(value: Any) -> str:
    """Return a file name; ValueError unless it stays within the folder.

    Subfolders are allowed.
    """
    name = str(value)
    if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"the file name {name!r} points out of the folder")
    if "\0" in name or any(len(os.fsencode(part)) > _MOST_NAME_NBYTES for part in name.split("/")):
        raise ValueError(f"no file can have the name {name!r:.80}")
    return name
