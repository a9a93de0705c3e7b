"""Files by path, glob pattern, braces, or a list of these."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from feedline.cancelling import DaemonPool
from feedline.datasets.files import Pathlike
from feedline.errors import ArgumentError
from feedline.stores import Cache, ObjectInfo, ObjectNotFoundError, Store
from feedline.stores.addresses import local_path, scheme_of
from feedline.stores.blobs import Blobs, local_info
from feedline.stores.finding import Finder
from feedline.stores.patterns import unbraced
from feedline.stores.whereabouts import expanded, is_special, missing, special_entry

_ASKED_AT_ONCE = 32

Paths = Pathlike | Sequence[Pathlike]


def matching(paths: Paths, inside: str) -> list[str]:
    """The absolute paths of existing files that are meant, in the order given, those of a pattern sorted.

    `{a,b}` and `{000..127}` are written out as `stores.patterns` says; `*`, `?`, `[...]` and `**` match. A path that
    exists is taken as it is; a folder stands for the files that the pattern `inside` finds in it. `~` is the home
    folder. Folders, pipes and devices are no files; a link to nothing is one, which is named when it is read.
    FileNotFoundError names a path that is not there, and a pattern that matches nothing.
    """
    meant = [path for given in listed(paths) for path in unbraced(expanded(given))]
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
) -> Blobs:
    """What paths, addresses and patterns mean, files and objects alike; for files as `matching` says.

    Objects are read through a cache in the folder `cache` if one is given; `options` are those of `open_store`.
    FileNotFoundError, which ObjectNotFoundError is too, names what is not there.
    """
    meant = [each for several in found(paths, inside, cache=cache, options=options) for each in several]
    if not meant:
        raise FileNotFoundError("no files: the list of paths is empty")
    return Blobs(meant)


Found = list[tuple[Store | None, ObjectInfo]]
"""Objects and their stores, in order; files of this machine have none."""


def found(
    paths: Paths, inside: str, *, cache: Cache | Pathlike | None = None, options: Mapping[str, Any] | None = None
) -> list[Found]:
    """What each path, address or pattern means, as `find` says; many are asked for at once."""
    finder = Finder(os.fspath(cache) if isinstance(cache, os.PathLike) else cache, options)

    def meant(given: Pathlike) -> Found:
        if scheme_of(given) == "file":
            return [(None, _info(path)) for path in matching(local_path(given), inside)]
        return [*finder.found(os.fspath(given), inside)]

    several = listed(paths)
    if all(scheme_of(given) == "file" for given in several):
        return [meant(given) for given in several]
    with DaemonPool(_ASKED_AT_ONCE) as pool:
        return list(pool.map(meant, several))


def _info(path: str) -> ObjectInfo:
    try:
        return local_info(path)
    except FileNotFoundError:
        raise missing(path) from None
