"""The folder that shards are written into: held by one run at a time, cleared of what an interrupted run left."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from feedline.errors import ArgumentError
from feedline.packing.manifest import MANIFEST, Manifest
from feedline.packing.tars import CLASSES
from feedline.packing.writing import partial

_LEFTOVER = re.compile(r"\..*\.part|shard-\d{6,}\.tar\.index\.partial-\d+")
_SHARD = re.compile(r"shard-(\d{6,})\.tar(\.index)?")


def shard_name(number: int) -> str:
    return f"shard-{number:06}.tar"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this run alone; ArgumentError while another one packs into it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the kernel however the process ends
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise ArgumentError(f"another feedline pack writes into {folder}; wait for it, or stop it") from None
        # A file system without locks: nothing is guarded there.


def refuse_inside(folder: Path, sources: Sequence[str]) -> None:
    """ArgumentError if the folder lies in a source: the next run would find its own shards among the samples."""
    for source in map(Path, sources):
        place = (source if source.is_dir() else source.parent).resolve()
        if folder.resolve().is_relative_to(place) and (source.is_dir() or folder.resolve() == place):
            raise ArgumentError(f"{folder} lies in {place}, which is packed; choose a folder elsewhere")


def begun(folder: Path) -> Manifest | None:
    """The manifest in the folder; ArgumentError if there is none, but other files."""
    found = Manifest.load(folder)
    others = [] if found else sorted(e.name for e in folder.iterdir() if not _LEFTOVER.fullmatch(e.name))
    if others:
        raise ArgumentError(f"{folder} is not empty (it holds {others[0]}), and has no {MANIFEST}; choose a new folder")
    return found


def clear(folder: Path, shards: int) -> None:
    """Remove what an interrupted run left behind its first `shards` shards."""
    for entry in folder.iterdir():
        match = _SHARD.fullmatch(entry.name)
        if _LEFTOVER.fullmatch(entry.name) or (match and int(match[1]) >= shards):
            entry.unlink()


def write_classes(folder: Path, classes: Sequence[str]) -> None:
    """`classes.json`: a list, in which a label is an index."""
    place, text = folder / CLASSES, json.dumps(list(classes), indent=1, ensure_ascii=False) + "\n"
    if not place.is_file() or place.read_text(encoding="utf-8") != text:
        partial(place).write_text(text, encoding="utf-8")
        partial(place).replace(place)
