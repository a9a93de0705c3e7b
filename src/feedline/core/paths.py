"""Local paths as users write them: with `~`, or misspelled.

The module also finds the user's cache folder, for files that can be recreated: indexes, metadata, decompressed shards.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from feedline.errors import ArgumentError, ObjectNotFoundError

Pathlike = str | os.PathLike[str]


_MAX_NAMES = 10_000
"""Number of names in a folder that are compared with a missing name: a folder of samples may hold millions."""


_NUMBER = re.compile(r"[0-9]+")


def expand_user(path: str | os.PathLike[str]) -> str:
    """The path with its `~` expanded.

    The path is unchanged if a file with exactly that name exists.
    """
    text = os.fspath(path)
    if not text.startswith("~") or os.path.lexists(text.partition("/")[0]):
        return text
    return os.path.expanduser(text)  # noqa: PTH111 - Path would change how the rest is written


_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")


def folder_path(folder: Pathlike, name: str) -> Path:
    """The absolute path of a local folder, with its `~` expanded.

    ArgumentError for "" and for addresses of stores. `name` is that of the argument.
    """
    text = os.fspath(folder)
    if not text or _ADDRESS.match(text):
        raise ArgumentError(f"{name}={text!r}: give a folder of this machine")
    return Path(expand_user(text)).absolute()


def missing_error(path: str | os.PathLike[str], problem: str = "no such file") -> ObjectNotFoundError:
    """The exception for a path that does not exist.

    Its message names the part of the path that exists, and a similar name.
    """
    full = Path(os.path.abspath(expand_user(path)))  # noqa: PTH100 - links are kept as they are
    there = next(each for each in (full, *full.parents) if os.path.lexists(each) or each == each.parent)
    message = f"{problem}: {full}"
    if there.is_symlink() and not there.exists():
        return ObjectNotFoundError(f"{message} ({there} is a link to {there.readlink()}, which does not exist)")
    if there == full:  # it was created in the meantime, or is of another kind
        return ObjectNotFoundError(message)
    if not there.is_dir():
        return ObjectNotFoundError(f"{message} ({there} is a file, not a folder)")
    gone, *rest = full.relative_to(there).parts
    message += f" ({there} exists, but has no {gone})"
    near = _nearest(there, gone)
    if near is None:
        return ObjectNotFoundError(message)
    whole = Path(there, near, *rest)
    return ObjectNotFoundError(f"{message}; did you mean {whole if whole.exists() else there / near}?")


def _nearest(folder: Path, name: str) -> str | None:
    """The most similar name in a folder, ignoring case.

    Names with different numbers are not similar.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _MAX_NAMES)]
        alike = {each.casefold(): each for each in names if _same_numbers(each, name)}
        for close in difflib.get_close_matches(name.casefold(), alike, 1):
            return alike[close]
    return None


def _same_numbers(name: str, other: str) -> bool:
    """True if two names have the same numbers, if both have any.

    A missing shard 7 is not a misspelled shard 6.
    """
    one, two = ([int(number) for number in _NUMBER.findall(each)] for each in (name, other))
    return not one or not two or one == two


def make_folder(folder: str | os.PathLike[str], given: str) -> None:
    """Create a folder if it is missing.

    ArgumentError if it cannot be created. The message begins with `given`, the argument of the caller, such as
    `cache='/x'`.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"{given}: {os.fspath(folder)} is not a folder and cannot be created ({error.strerror}); pass a writable "
            "folder"
        ) from error


def is_special(path: str) -> bool:
    """True if a path is a folder, pipe or device.

    Links are followed. A path without a status counts as a file: the attempt to read it reports the reason.
    """
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 - for each of many links
    except OSError:
        return False


def files_below(folder: str, beginning: str = "") -> Iterator[str]:
    """The paths of all files below a folder, in no order.

    Links to folders are followed, except to a folder that contains the link. `beginning` selects the entries of
    `folder`. OSError for a folder that cannot be read.
    """
    return _files_below(folder, beginning, frozenset())


def _files_below(folder: str, beginning: str, outer: frozenset[tuple[int, int]]) -> Iterator[str]:
    status = os.stat(folder)  # noqa: PTH116 - for each of many folders
    identity = status.st_dev, status.st_ino
    if identity in outer:
        return
    with os.scandir(folder) as found:
        entries = [entry for entry in found if entry.name.startswith(beginning)]
    for entry in entries:
        if _is_folder(entry):
            yield from _files_below(entry.path, "", outer | {identity})
        else:
            yield entry.path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself: the attempt to read it reports the reason
        return False


def special_entry(entry: os.DirEntry[str]) -> bool:
    """`is_special` of a directory entry; only links need a system call."""
    return not entry.is_file(follow_symlinks=False) and (not entry.is_symlink() or is_special(entry.path))


def user_cache(*names: str) -> str:
    """The path of these names in the user's cache.

    That is `~/.cache/feedline`, or below `XDG_CACHE_HOME`; it may not exist yet.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - for thousands of shards
    return os.path.join(root, "feedline", *names)  # noqa: PTH118 - as above


PARTIAL = re.compile(r"(.+)\.partial-[0-9a-f]{12}")
"""Pattern of the names of files that a `Replacement` has not finished; its group is the final name."""


class Replacement:
    """A new file under a temporary name, which `finish` renames to `path`.

    Processes that have the older file mapped keep it. `durable` writes the data to the disk before the name points to
    it, so that a crash leaves the old or the new file. That is not needed for files that can be recreated, and whose
    checksums or lengths reveal an incomplete write.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = False, buffer_nbytes: int = -1) -> None:
        self._path, self._durable = os.fspath(path), durable
        # Random, not a process or thread id: hosts that share the folder may have the same ones at the same time.
        self._partial = Path(f"{self._path}.partial-{uuid4().hex[:12]}")
        self.file: BinaryIO = open(self._partial, "wb", buffering=buffer_nbytes)  # noqa: SIM115 - until `finish`

    def finish(self) -> None:
        """Close the file, and rename it."""
        with self.file:
            if self._durable:
                self.file.flush()
                os.fsync(self.file.fileno())
        self._partial.replace(self._path)

    def discard(self) -> None:
        """Close and remove the file, unless it is finished."""
        self.file.close()
        self._partial.unlink(missing_ok=True)


@contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = False) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` when the block ends without error.

    `durable` has the same meaning as for `Replacement`.
    """
    replacement = Replacement(path, durable=durable)
    try:
        yield replacement.file
        replacement.finish()
    except BaseException:
        replacement.discard()
        raise
