"""Files by path, glob pattern, braces, or a list of these.

The files of a table: of a folder, without what its writers keep aside in `_temporary`, `_delta_log` and the like.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from feedline.core.paths import expand_user, is_special, missing, special_entry
from feedline.core.threads import DaemonPool
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.errors import ArgumentError
from feedline.stores import Cache, ObjectInfo, ObjectNotFoundError, Store
from feedline.stores.files import FileSet, local_info
from feedline.stores.globs import braces, expand_braces
from feedline.stores.open import Finder
from feedline.stores.urls import is_local, join, local_path, split

Paths = Pathlike | Sequence[Pathlike]


def matching(paths: Paths, inside: str) -> list[str]:
    """The absolute paths of existing files that are meant, in the order given, those of a pattern sorted.

    `{a,b}` and `{000..127}` are written out as `stores.patterns` says; `*`, `?`, `[...]` and `**` match. A path that
    exists is taken as it is; a folder stands for the files that the pattern `inside` finds in it. `~` is the home
    folder. Folders, pipes and devices are no files; a link to nothing is one, which is named when it is read.
    FileNotFoundError names a path that is not there, and a pattern that matches nothing.
    """
    meant = [path for given in listed(paths) for path in expand_braces(expand_user(given))]
    found = [str(Path(file).absolute()) for path in meant for file in _files(path, inside)]
    if not found:
        raise FileNotFoundError("no files: the list of paths is empty")
    return found


def listed(paths: Paths) -> list[Pathlike]:
    """One path, or several, as a list."""
    return [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)


def _files(path: str, inside: str) -> list[str]:
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - of many thousands
    except (FileNotFoundError, NotADirectoryError):
        if glob.has_magic(path):
            return _matches(path, path)
        raise missing(path) from None
    if stat.S_ISDIR(mode):
        return _matches(str(Path(glob.escape(path), inside)), str(Path(path, inside)))
    if not stat.S_ISREG(mode):
        raise ArgumentError(f"{path} is a pipe or a device: only files can be read in any order, so write it to one")
    return [path]


def _matches(pattern: str, told: str) -> list[str]:
    """The files that match, sorted; errors call the pattern as it is `told`."""
    names = glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    files = sorted(_regular(names, pattern))
    if not files:
        raise _nothing(told, "" if not names else ", but folders or the like ('**' goes into folders)")
    return files


def _regular(names: list[str], pattern: str) -> list[str]:
    """Those of the matches that are files. Where folders were read for them, reading these again tells all kinds."""
    if not glob.has_magic(os.path.basename(pattern)):  # noqa: PTH119 - of a pattern
        return [name for name in names if not is_special(name)]
    special = {name for folder in {os.path.dirname(name) for name in names} for name in _special(folder)}  # noqa: PTH120
    return [name for name in names if name not in special and not name.endswith(os.sep)]


def _special(folder: str) -> list[str]:
    with os.scandir(folder or os.curdir) as entries:
        return [os.path.join(folder, entry.name) for entry in entries if special_entry(entry)]  # noqa: PTH118


def _nothing(pattern: str, but: str) -> ObjectNotFoundError:
    full = os.path.abspath(pattern)  # noqa: PTH100 - of a pattern
    said = f"no files: {full!r} matches none{but}"
    folder = next(each for each in Path(full).parents if not glob.has_magic(str(each)))
    return ObjectNotFoundError(said) if folder.exists() else missing(folder, f"{said}: no such folder")


def find(
    paths: Paths, inside: str, *, cache: Cache | Pathlike | None = None, options: Mapping[str, Any] | None = None
) -> FileSet:
    """What paths, addresses and patterns mean, files and objects alike; for files as `matching` says.

    Objects are read through a cache in the folder `cache` if one is given; `options` are those of `open_store`.
    FileNotFoundError, which ObjectNotFoundError is too, names what is not there.
    """
    meant = [each for several in found(paths, inside, cache=cache, options=options) for each in several]
    if not meant:
        raise FileNotFoundError("no files: the list of paths is empty")
    return FileSet(meant)


Found = list[tuple[Store | None, ObjectInfo]]
"""Objects and their stores, in order; files of this machine have none."""


def found(
    paths: Paths, inside: str, *, cache: Cache | Pathlike | None = None, options: Mapping[str, Any] | None = None
) -> list[Found]:
    """What each path, address or pattern means, as `find` says; many are asked for at once."""
    finder = Finder(os.fspath(cache) if isinstance(cache, os.PathLike) else cache, options)

    def meant(given: Pathlike) -> Found:
        if is_local(given):
            return [(None, _info(path)) for path in matching(local_path(given), inside)]
        return [*finder.resolve(os.fspath(given), inside)]

    several = listed(paths)
    if all(is_local(given) for given in several):
        return [meant(given) for given in several]
    with DaemonPool() as pool:
        return list(pool.map(meant, several))


def _info(path: str) -> ObjectInfo:
    try:
        return local_info(path)
    except FileNotFoundError:
        raise missing(path) from None


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
) -> FileSet:
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
    return FileSet(meant)


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
    if not is_local(given):
        return braces(given)
    return [str(Path(path).absolute()) for path in expand_braces(local_path(given))]


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
