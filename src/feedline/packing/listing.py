"""What sources hold: folders of files, or tar shards, given one by one or by their folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from feedline.errors import ArgumentError
from feedline.packing import folders, tars
from feedline.packing.samples import Listing


def listed(sources: Sequence[str]) -> Listing:
    """The samples of all sources; ArgumentError for what is neither tars nor folders, or both."""
    found = tars_of(sources)
    return tars.listed(found) if found else folders.listed(sources)


def tars_of(sources: Sequence[str]) -> list[str]:
    """The tars that the sources are or hold; none if all are folders of files."""
    found = [_tars(source) for source in sources]
    if any(found) and not all(found):
        raise ArgumentError("the sources are partly tar shards, partly folders of files; take one kind after the other")
    return [tar for group in found for tar in group]


def _tars(source: str) -> list[str]:
    if "://" in source:
        raise ArgumentError(f"{source} is an address, and this reads files of this machine: copy what it names first")
    path = Path(source)
    if path.is_dir():
        return sorted(str(entry) for entry in path.iterdir() if entry.suffix == ".tar" and entry.is_file())
    if not path.exists():
        raise ArgumentError(f"{source} does not exist")
    if path.suffix != ".tar":
        raise ArgumentError(f"{source} is neither a folder nor a .tar file")
    return [source]
