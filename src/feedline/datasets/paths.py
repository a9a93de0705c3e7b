"""Resolution of paths, glob patterns, braces and addresses to files and objects.

`matching` and `find` return all files, `found` those of each path.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from feedline.core.paths import Pathlike, expand_user, is_special, missing_error, special_entry
from feedline.core.threads import DaemonPool
from feedline.datasets.signatures import FOLDERS
from feedline.errors import ArgumentError
from feedline.stores import Cache, ObjectInfo, ObjectNotFoundError, Store
from feedline.stores.files import FileSet, local_info
from feedline.stores.globs import braces, expand_braces, first_forms
from feedline.stores.open import Finder
from feedline.stores.urls import is_local, local_path

Paths = Pathlike | Sequence[Pathlike]


def no_files_error() -> FileNotFoundError:
    """The error for an empty list of paths."""
    return FileNotFoundError("no files: the list of paths is empty; pass at least one path or pattern")


def matching(paths: Paths, inside: str) -> list[str]:
    """Resolve paths to the absolute paths of existing files.

    Files keep the order of `paths`; files of a pattern are sorted. `{a,b}` and `{000..127}` are expanded as in
    `stores.expand`; `*`, `?`, `[...]` and `**` match. An existing path is taken literally, and `~` is the home folder.
    A folder stands for the files in it that match the pattern `inside`, which may have braces. If the pattern ends with
    braces, a file that exists in several of these forms counts once, in the first form. Folders, pipes and devices are
    not files. A broken link counts as a file, and raises an error when it is read. FileNotFoundError names a missing
    path, and a pattern without matches.
    """
    meant = [path for given in listed(paths) for path in expand_braces(expand_user(given))]
    found = [str(Path(file).absolute()) for path in meant for file in _files(path, inside)]
    if not found:
        raise no_files_error()
    return found


def listed(paths: Paths) -> list[Pathlike]:
    return [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)


def _files(path: str, inside: str) -> list[str]:
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - of many thousands
    except (FileNotFoundError, NotADirectoryError):
        if glob.has_magic(path):
            return _matches(path)
        raise missing_error(path) from None
    if stat.S_ISDIR(mode):
        return _inside(path, inside)
    if not stat.S_ISREG(mode):
        raise ArgumentError(
            f"{path} is a pipe or a device, which cannot be read in any order: write its content to a file"
        )
    return [path]


def _inside(folder: str, pattern: str) -> list[str]:
    """The matching files of a folder, each in one form, sorted."""
    each = [str(Path(glob.escape(folder), form)) for form in braces(pattern)]
    files = {name for form in each for name in _regular(_names(form), form)}
    if not files:
        raise _no_match_error(str(Path(folder, pattern)), _EXCEPT if any(map(_names, each)) else "")
    return first_forms(sorted(files), pattern)


_EXCEPT = " except folders or special files ('**' searches folders)"


def _matches(pattern: str) -> list[str]:
    """The matching files, sorted."""
    names = _names(pattern)
    files = sorted(_regular(names, pattern))
    if not files:
        raise _no_match_error(pattern, _EXCEPT if names else "")
    return files


def _names(pattern: str) -> list[str]:
    return glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern


def _regular(names: list[str], pattern: str) -> list[str]:
    """Filter the matches that are regular files.

    If the pattern matched in folders, listing those again is faster than a `stat` of each match.
    """
    if not glob.has_magic(os.path.basename(pattern)):  # noqa: PTH119 - of a pattern
        return [name for name in names if not is_special(name)]
    special = {name for folder in {os.path.dirname(name) for name in names} for name in _special(folder)}  # noqa: PTH120
    return [name for name in names if name not in special and not name.endswith(os.sep)]


def _special(folder: str) -> list[str]:
    with os.scandir(folder or os.curdir) as entries:
        return [os.path.join(folder, entry.name) for entry in entries if special_entry(entry)]  # noqa: PTH118


def _no_match_error(pattern: str, exception: str) -> ObjectNotFoundError:
    full = os.path.abspath(pattern)  # noqa: PTH100 - of a pattern
    message = f"no files: {full!r} matches none{exception}"
    folder = next(each for each in Path(full).parents if not glob.has_magic(str(each)))
    kind = next((what for name, what in FOLDERS.items() if (folder / name).exists()), "")
    message += f"; {folder} is {kind}" if kind else ""
    return ObjectNotFoundError(message) if folder.exists() else missing_error(folder, f"{message}: no such folder")


def find(
    paths: Paths, inside: str, *, cache: Cache | Pathlike | None = None, options: Mapping[str, Any] | None = None
) -> FileSet:
    """Resolve paths, addresses and patterns to files and objects.

    Files are resolved as by `matching`. Objects are read through a cache in the folder `cache` if one is given;
    `options` are passed to `open_store`. FileNotFoundError, the base of ObjectNotFoundError, names the missing file.
    """
    objects = [each for several in find_each(paths, inside, cache=cache, options=options) for each in several]
    if not objects:
        raise no_files_error()
    return FileSet(objects)


FoundFiles = list[tuple[Store | None, ObjectInfo]]
"""Files and objects in order, each with its store; None for files."""


def find_each(
    paths: Paths, inside: str, *, cache: Cache | Pathlike | None = None, options: Mapping[str, Any] | None = None
) -> list[FoundFiles]:
    """Resolve each path separately, as `find` does; remote paths concurrently."""
    finder = Finder(cache, options)

    def resolve(given: Pathlike) -> FoundFiles:
        if is_local(given):
            return [(None, _info(path)) for path in matching(local_path(given), inside)]
        return [*finder.resolve(os.fspath(given), inside)]

    several = listed(paths)
    if all(is_local(given) for given in several):
        return [resolve(given) for given in several]
    with DaemonPool() as pool:
        return list(pool.map(resolve, several))


def _info(path: str) -> ObjectInfo:
    try:
        return local_info(path)
    except FileNotFoundError:
        raise missing_error(path) from None


def paths_of(given: Any, *others: str) -> list[Pathlike]:
    """One or several paths as a list.

    ArgumentError if `given` is neither of them, nor one of the `others`.
    """
    several = [given] if isinstance(given, (str, os.PathLike)) else given
    several = list(several) if isinstance(several, Iterable) else [None]
    if all(isinstance(each, (str, os.PathLike)) for each in several):
        return several
    wanted = ", ".join(["a path", "an address", "a pattern", *others])
    raise ArgumentError(f"{given!r:.100} is not a path: give {wanted}, or a list of paths")


def columns_of(given: Any) -> list[str] | None:
    """The columns as a list; ArgumentError for a single string.

    Its letters would otherwise count as names.
    """
    if isinstance(given, str):
        raise ArgumentError(f"columns={given!r}: give a list of names, such as [{given!r}]")
    return None if given is None else list(given)
