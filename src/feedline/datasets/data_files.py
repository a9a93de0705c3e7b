"""The files of a table: of a folder, without what its writers keep aside in `_temporary`, `_delta_log` and the like."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from feedline.datasets.files import Pathlike
from feedline.datasets.paths import Found, found
from feedline.errors import ArgumentError
from feedline.stores import Cache, ObjectInfo, ObjectNotFoundError, Store
from feedline.stores.addresses import join, scheme_of, split
from feedline.stores.blobs import Blobs
from feedline.stores.patterns import braces, unbraced
from feedline.stores.whereabouts import expanded

_DELTA = "_delta_log"


def paths_of(given: Any, *others: str) -> list[Pathlike]:
    """One path or several as a list; ArgumentError if it is neither, nor one of the `others`."""
    several = [given] if isinstance(given, (str, os.PathLike)) else given
    several = list(several) if isinstance(several, Iterable) else [None]
    if all(isinstance(each, (str, os.PathLike)) for each in several):
        return several
    wanted = ", ".join(["a path", "an address", "a pattern", *others])
    raise ArgumentError(f"{given!r:.100} is no path: give {wanted}, or a list of paths")


def columns_of(given: Any) -> list[str] | None:
    """The columns that are wanted; ArgumentError for a single text, whose letters would be taken for names."""
    if isinstance(given, str):
        raise ArgumentError(f"columns={given!r}: give a list of names, such as [{given!r}]")
    return None if given is None else list(given)


def data_files(
    paths: Sequence[Pathlike], inside: str, *, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None
) -> Blobs:
    """What paths, addresses and patterns mean, as `paths.find` says; of a folder, what matches `inside` and is data.

    Names below it that begin with `_` or `.` are no data, but for folders such as `_year=2024`. ArgumentError refuses
    a Delta table, in whose folder files lie that are no longer part of it.
    """
    meant = [
        each
        for given, several in zip(paths, found(paths, inside, cache=cache, options=options), strict=True)
        for each in _data(os.fspath(given), several)
    ]
    if not meant:
        raise FileNotFoundError("no files: the list of paths is empty")
    return Blobs(meant)


def _data(given: str, several: Found) -> Found:
    """What of the files that a path means is data."""
    folders = [f"{folder.rstrip('/')}/" for folder in _plain(given)]
    placed = [_placed(_name(each), folders) for each in several]
    for folder in {folder for folder, _ in placed if folder}:
        _refuse_delta(folder, several[0][0])
    for folder, path in placed:
        if f"/{_DELTA}/" in f"/{path}":
            raise _no_delta(f"{folder}{path.partition(_DELTA)[0]}")
    kept = [each for each, (_, path) in zip(several, placed, strict=True) if not any(map(_is_aside, path.split("/")))]
    if several and not kept:
        raise ObjectNotFoundError(f"no files: in {given} there are none but in what begins with '_' or '.'")
    return kept


def _plain(given: str) -> list[str]:
    """What a path with braces stands for, as the names of what is found in it begin."""
    if scheme_of(given) != "file":
        return braces(given)
    return [str(Path(path).absolute()) for path in unbraced(expanded(given.removeprefix("file://")))]


def _name(each: tuple[Store | None, ObjectInfo]) -> str:
    store, info = each
    return info.path if store is None else join(store.url, info.path)


def _placed(name: str, folders: Sequence[str]) -> tuple[str, str]:
    """The folder that was given, and the path below it; neither of what was given by its name or a pattern."""
    return next(((folder, name[len(folder) :]) for folder in folders if name.startswith(folder)), ("", ""))


def _is_aside(part: str) -> bool:
    return part.startswith(("_", ".")) and "=" not in part


def _refuse_delta(folder: str, store: Store | None) -> None:
    if Path(folder, _DELTA).is_dir() if store is None else _has(store, f"{split(folder).path}{_DELTA}/"):
        raise _no_delta(folder)


def _has(store: Store, folder: str) -> bool:
    with suppress(ObjectNotFoundError):  # some stores know folders
        return any(True for _ in store.list(folder))
    return False


def _no_delta(folder: str) -> ArgumentError:
    table = folder.rstrip("/")
    return ArgumentError(
        f"{table} is a Delta table, in whose folder files lie that are no longer part of it; give those that are, as"
        f" the package deltalake lists them: Parquet(DeltaTable({table!r}).file_uris())"
    )
