"""Paths of this machine as people write them: with `~`, mistyped, or where nothing can be kept.

The folder of this user that holds what can be made again: indexes, descriptions, decompressed shards.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from contextlib import suppress
from itertools import islice
from pathlib import Path

from feedline.errors import ArgumentError, ObjectNotFoundError

_LOOKED_AT = 10_000
"""So many names of a folder are compared with the one that it has not: a folder of samples may hold millions."""


_NUMBER = re.compile(r"[0-9]+")


def expanded(path: str | os.PathLike[str]) -> str:
    """The path with the home folder in place of its `~`; as it is where something of that very name exists."""
    text = os.fspath(path)
    if not text.startswith("~") or os.path.lexists(text.partition("/")[0]):
        return text
    return os.path.expanduser(text)  # noqa: PTH111 - Path would change how the rest is written


def missing(path: str | os.PathLike[str], said: str = "no such file") -> ObjectNotFoundError:
    """What to raise when nothing is at `path`: tells how far the path leads, and what may have been meant by it."""
    full = Path(os.path.abspath(expanded(path)))  # noqa: PTH100 - links are kept as they are
    there = next(each for each in (full, *full.parents) if os.path.lexists(each) or each == each.parent)
    told = f"{said}: {full}"
    if there.is_symlink() and not there.exists():
        return ObjectNotFoundError(f"{told} ({there} is a link to {there.readlink()}, which is not there)")
    if there == full:  # it came in the meantime, or is of another kind
        return ObjectNotFoundError(told)
    if not there.is_dir():
        return ObjectNotFoundError(f"{told} ({there} is a file, and holds no others)")
    gone, *rest = full.relative_to(there).parts
    told += f" ({there} exists, but has no {gone})"
    near = _nearest(there, gone)
    if near is None:
        return ObjectNotFoundError(told)
    whole = Path(there, near, *rest)
    return ObjectNotFoundError(f"{told}; did you mean {whole if whole.exists() else there / near}?")


def _nearest(folder: Path, name: str) -> str | None:
    """The name in a folder that is most like another, in small letters or capitals; one of another number is not."""
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _LOOKED_AT)]
        alike = {each.casefold(): each for each in names if _numbered_alike(each, name)}
        for close in difflib.get_close_matches(name.casefold(), alike, 1):
            return alike[close]
    return None


def _numbered_alike(name: str, other: str) -> bool:
    """Whether the numbers in two names, if both have any, are the same: shard 6 is not meant by shard 7."""
    one, two = ([int(number) for number in _NUMBER.findall(each)] for each in (name, other))
    return not one or not two or one == two


def made(folder: str | os.PathLike[str], given: str) -> None:
    """Make a folder if it is not there; ArgumentError if that cannot be, naming it as it was `given`: `cache='/x'`."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"{given}: {os.fspath(folder)} is no folder, and cannot be made one ({error.strerror}); give a folder that "
            "can be written to"
        ) from error


def is_special(path: str) -> bool:
    """Whether this is no regular file, nor a link to one, but a folder, a pipe or a device.

    What the system tells nothing of is taken for a file: reading it says why.
    """
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 - for each of many links
    except OSError:
        return False


def special_entry(entry: os.DirEntry[str]) -> bool:
    """As `is_special`, of an entry whose folder was just read: asks the system about links only."""
    return not entry.is_file(follow_symlinks=False) and (not entry.is_symlink() or is_special(entry.path))


def user_cache(*names: str) -> str:
    """The place with these names in `~/.cache/feedline`, or below `XDG_CACHE_HOME`; it may not be there yet."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - for thousands of shards
    return os.path.join(root, "feedline", *names)  # noqa: PTH118 - as above
