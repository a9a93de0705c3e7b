"""Tar shards whose indexes `feedline index` builds and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from feedline.core.paths import make_folder
from feedline.datasets.formats import FORMATS
from feedline.datasets.inflated import inflated
from feedline.datasets.paths import find
from feedline.datasets.webdataset.build_index import measure_intervals
from feedline.datasets.webdataset.index import Head, TarIndex
from feedline.datasets.webdataset.index_files import (
    build_index,
    check_not_truncated,
    find_index,
    index_paths,
    open_index,
    read_head,
    without_indexes,
)
from feedline.datasets.webdataset.sources import TarSource
from feedline.datasets.webdataset.tar import opener_of
from feedline.errors import ArgumentError, SampleError
from feedline.stores.files import File, FileSet, local_info
from feedline.stores.urls import is_local


@dataclass(frozen=True, slots=True)
class TarTarget:
    """A tar shard and the folder of its index.

    Without a folder, indexes of files are next to them, those of objects in the user's cache folder.
    """

    source: TarSource
    folder: Path | None
    allow_truncated: bool

    @property
    def name(self) -> str:
        """Path or URL of the tar."""
        return self.source.name

    @property
    def place(self) -> str:
        """Path of the index."""
        return index_paths(self.name, self.folder)[0]

    @property
    def file(self) -> File | None:
        """The tar as an object or as content; None for a file."""
        file = self.source.file
        return file if file.local_path is None else None

    def head(self) -> Head | None:
        """Header of the existing index; None without a valid one.

        An index next to an object is copied to `place`.
        """
        known = partial(
            read_head, self.name, self.source.version, index_dir=self.folder, allow_truncated=self.allow_truncated
        )
        head = known()
        if head is None and not is_local(self.name):
            find_index(self.source, self.folder)
            head = known()
        return head

    def make(self, *, checksum: bool) -> TarIndex:
        """Build the index, including grids of JPEGs, and write it to `place`."""
        make_folder(Path(self.place).parent, "the folder of the index")
        index = build_index(
            self.source, measure=measure_intervals, checksum=checksum, allow_truncated=self.allow_truncated
        )
        index.write(self.place, index.head.version)
        return index

    def index(self) -> TarIndex | None:
        """The existing index, or None without one.

        An invalid index raises ShardError for a file, and gives None for an object.
        """
        if not is_local(self.name):
            index = find_index(self.source, self.folder)
            return None if index is None else check_not_truncated(index, self.allow_truncated)
        if not Path(self.place).is_file():
            return None
        return open_index(self.source, self.place, allow_truncated=self.allow_truncated)

    def known(self, *, checksum: bool) -> int | None:
        """The number of samples by a valid index; None without one.

        With `checksum`, the index must have one.
        """
        head = self.head()
        return None if head is None or (checksum and not head.blake2b) else head.samples

    def write(self, *, checksum: bool) -> int:
        """Build the index; returns the number of samples."""
        return len(self.make(checksum=checksum))

    def check(self) -> tuple[int, str]:
        """Compare tar and index.

        Returns the number of samples, and the path of the index. The comparison uses the checksum, if there is one;
        else the index is built again in memory. SampleError if there is no index, or if it differs.
        """
        index = self.index()
        if index is None:
            raise SampleError(f"{self.name} has no index. Build it: feedline index {self.name}")
        if index.head.blake2b is not None:
            index.verify(self.source)
        elif not _is_same(index, build_index(self.source, allow_truncated=self.allow_truncated)):
            raise SampleError(
                f"the index of {self.name} does not match the tar. Rebuild it: feedline index --rebuild {self.name}"
            )
        return len(index), index.path or ""


def find_tar_targets(
    sources: Sequence[str], folder: Path | None = None, allow_truncated: bool = False
) -> list[TarTarget]:
    """The tars of paths, URLs and patterns; ArgumentError if there are none.

    Compressed tars are decompressed as by `TarShards`.
    """
    if has_urls(sources) or has_compressed(sources):
        stored = without_indexes(find(sources, FORMATS["tar"].pattern))
        tars = inflated(stored, [opener_of(name) for name in stored.names], None)
    else:
        tars = FileSet([(None, local_info(str(Path(path).absolute()))) for path in _find_files(sources)])
    return [TarTarget(TarSource(tars, number), folder, allow_truncated) for number in range(len(tars))]


def has_urls(sources: Sequence[str]) -> bool:
    """True if any source is a URL."""
    return any("://" in source for source in sources)


def has_compressed(sources: Sequence[str]) -> bool:
    """True if any local source is, or contains, a compressed tar."""
    found = [path for each in map(Path, sources) for path in (each.iterdir() if each.is_dir() else [each])]
    tar = FORMATS["tar"]
    return any(tar.matches(path.name) and opener_of(path.name) is not None for path in found)


def _find_files(sources: Sequence[str]) -> list[str]:
    tars = find_tars(sources)
    if not tars:
        raise ArgumentError(f"no .tar files in {', '.join(sources)}")
    return tars


def find_tars(sources: Sequence[str]) -> list[str]:
    """Tars among the sources or in their folders.

    Empty if all sources are folders of files; ArgumentError for other sources, and for a mixture.
    """
    groups = [_find_tars(source) for source in sources]
    if any(groups) and not all(groups):
        raise ArgumentError("some sources are tar shards, others folders of files; pass them separately")
    return [tar for group in groups for tar in group]


def _find_tars(source: str) -> list[str]:
    if "://" in source:
        raise ArgumentError(f"{source} is a URL, but this command reads local files only: copy the data first")
    path = Path(source)
    if path.is_dir():
        return sorted(str(entry) for entry in path.iterdir() if entry.suffix == ".tar" and entry.is_file())
    if not path.exists():
        raise ArgumentError(f"{source} does not exist")
    if path.suffix != ".tar":
        raise ArgumentError(f"{source} is neither a folder nor a .tar file")
    return [source]


def _is_same(index: TarIndex, other: TarIndex) -> bool:
    return (
        index.fields == other.fields
        and list(index.keys) == list(other.keys)
        and np.array_equal(index.blocks, other.blocks)
        and np.array_equal(index.sizes, other.sizes)
    )
