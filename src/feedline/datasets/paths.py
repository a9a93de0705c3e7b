"""Files by path, glob pattern, braces, or a list of these."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from feedline.datasets.files import Pathlike
from feedline.stores import Cache, ObjectInfo, Store
from feedline.stores.addresses import scheme_of
from feedline.stores.blobs import Blobs, local_info
from feedline.stores.finding import Finder
from feedline.stores.patterns import unbraced

_ASKED_AT_ONCE = 32

Paths = Pathlike | Sequence[Pathlike]


def matching(paths: Paths, inside: str) -> list[str]:
    """The absolute paths of existing files that are meant, in the order given, those of a pattern sorted.

    `{a,b}` and `{000..127}` are written out as `stores.patterns` says; `*`, `?`, `[...]` and `**` match. A path that
    exists is taken as it is; a folder stands for the files that the pattern `inside` finds in it. FileNotFoundError
    names a path that is not there, and a pattern that matches nothing.
    """
    meant = [path for given in listed(paths) for path in unbraced(os.fspath(given))]
    found = [str(Path(file).absolute()) for path in meant for file in _files(path, inside)]
    if not found:
        raise FileNotFoundError("no files: the list of paths is empty")
    return found


def listed(paths: Paths) -> list[Pathlike]:
    """One path, or several, as a list."""
    return [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)


def _files(path: str, inside: str) -> Iterator[str]:
    if Path(path).is_dir():
        yield from _files(str(Path(glob.escape(path), inside)), inside)
    elif Path(path).exists():
        yield path
    elif glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not matches:
            raise FileNotFoundError(f"no files: {path!r} matches none")
        yield from matches
    else:
        raise FileNotFoundError(f"no such file: {path}")


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
            return [(None, local_info(path)) for path in matching(os.fspath(given).removeprefix("file://"), inside)]
        return [*finder.found(os.fspath(given), inside)]

    several = listed(paths)
    if all(scheme_of(given) == "file" for given in several):
        return [meant(given) for given in several]
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        return list(pool.map(meant, several))
