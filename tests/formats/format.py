"""`Format`: the facts about a dataset class that the suite needs to test it in every place."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import feedline as fl

Samples = Callable[[int], Any]


@dataclass(frozen=True)
class Format:
    """One way to open a dataset; `write` and `open` are required, the rest describes how the format differs.

    `write(folder)` makes a small corpus, the same each time. `open(root, **store)` opens it below a folder or an
    address. `sample(i)` is the expected sample i of `count`; without it (samples drawn at random, pixels decoded by a
    library) the local files are the reference.
    """

    write: Callable[[Path], object]
    open: Callable[..., Any]
    sample: Samples | None = None
    count: int = 24
    data: str = "*"
    """The files that the samples come from, as a pattern; the others describe them."""
    described_by: str = ""
    """The files that are read at each opening."""
    cut: tuple[str, int | float, str] | None = None
    """A file, what is left of it (its share, or the end of a slice), and the error, which names it where `{}` is."""
    together: int = 0
    """Requests that a batch over this many shards sends before it waits for the first answer."""
    collates: bool = True
    random: bool = False
    lists: bool = True
    """False if `open` names every file, so that a server without listings will do."""
    needs_cache: bool = False
    """True for a library that opens files only: the object is copied when the dataset is opened."""
    opened_late: bool = False
    """True if headers are read with the first sample."""
    versions: str = "always"
    """When a changed object is noticed: "always", "cached" (its version is needed for the cache) or "never"."""
    gone: str = "{}"
    """The error about a missing object; `{}` is its address. "" if that is no error."""
    indexed: bool = True
    """False if headers are read at each opening, so that no index is kept."""
    own_layout: bool = True
    """False if another format has the same files, and reads the same parts of them for other samples."""
    looks_up: bool = False
    """True if only the foreign library knows the places of some values, so that they cannot be prefetched."""

    @property
    def collate_fn(self) -> Any:
        return None if self.collates else list

    def data_files(self, files: Mapping[str, bytes]) -> list[str]:
        return [name for name in sorted(files) if fnmatch.fnmatch(name, self.data)]

    def described_nbytes(self, files: Mapping[str, bytes]) -> int:
        return sum(len(data) for name, data in files.items() if fnmatch.fnmatch(name, self.described_by))


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by their paths in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def epoch(dataset: Any, batch_size: int = 4, **settings: Any) -> list[Any]:
    """All samples in their order, as a loader with a seed draws them."""
    with fl.DataLoader(dataset, batch_size, seed=7, collate_fn=list, **settings) as loader:
        return [sample for batch in loader for sample in batch]
