"""`feedline index`: build and check side-car indexes of tar shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from feedline.cli.pack import find_tars, measure_intervals
from feedline.cli.progress import bars
from feedline.core.paths import make_folder
from feedline.core.threads import WorkAhead
from feedline.datasets import array_container
from feedline.datasets.paths import find
from feedline.datasets.webdataset import Head, TarIndex, build_index, glance, index_files, open_index, write_index
from feedline.datasets.webdataset.index_files import head_at, places, whole
from feedline.datasets.webdataset.sources import ObjectSource
from feedline.errors import ArgumentError, SampleError
from feedline.loader.resources import usable_cpus
from feedline.stores.files import RemoteBlob

if TYPE_CHECKING:
    from rich.console import Console


class TarTarget(Protocol):
    """A tar shard and its local index."""

    name: str
    """Path or URL of the tar."""
    place: str
    """Path of the index."""

    def head(self) -> Head | None:
        """Header of the existing index; None without a valid one."""
        ...

    def make(self, *, checksum: bool) -> TarIndex:
        """Build the index, including grids of JPEGs, and write it to `place`."""
        ...

    def index(self) -> TarIndex | None:
        """The existing index, or None without one.

        One that is not valid raises ShardError for a file, and is None for an object.
        """
        ...

    def build(self) -> TarIndex:
        """Build the index in memory, without grids."""
        ...

    def verify(self, index: TarIndex) -> None:
        """Raise ShardError if the tar does not match the checksum in `index`."""
        ...


class LocalTar:
    """A tar file. Its index is next to it, or in `folder`."""

    def __init__(self, path: str, folder: Path | None, *, allow_truncated: bool) -> None:
        self.name = path
        self.place = places(str(Path(path).absolute()), folder)[0]
        self._folder = folder
        self._allow_truncated = allow_truncated

    def head(self) -> Head | None:
        path = str(Path(self.name).absolute())
        return glance(path, index_dir=self._folder, allow_truncated=self._allow_truncated)

    def make(self, *, checksum: bool) -> TarIndex:
        make_folder(Path(self.place).parent, "the folder of the index")
        write_index(
            self.name, self.place, measure=measure_intervals, checksum=checksum, allow_truncated=self._allow_truncated
        )
        return open_index(self.name, self.place, allow_truncated=self._allow_truncated)

    def index(self) -> TarIndex | None:
        if not Path(self.place).is_file():
            return None
        return open_index(self.name, self.place, allow_truncated=self._allow_truncated)

    def build(self) -> TarIndex:
        return build_index(self.name, allow_truncated=self._allow_truncated)

    def verify(self, index: TarIndex) -> None:
        index.verify()


class RemoteTar:
    """A tar in an object store.

    Its index is in `folder`, or else in the user's cache folder. An index next to the object is found, too.
    """

    def __init__(self, blob: RemoteBlob, folder: Path | None, *, allow_truncated: bool) -> None:
        self.name = blob.name
        self.place = places(blob.name, folder)[0]
        self.blob = blob
        self._allow_truncated = allow_truncated

    def head(self) -> Head | None:
        """Header of the existing index; None without a valid one.

        An index next to the object is copied to `place`.
        """
        head = head_at(self.place, ObjectSource(self.blob).version)
        if head is None:
            index = index_files.looked_up(self.blob, self.place)
            head = None if index is None else self._write(index).head
        return head if head is None or head.cut is None or self._allow_truncated else None

    def make(self, *, checksum: bool) -> TarIndex:
        index = index_files.made(
            self.blob, measure=measure_intervals, checksum=checksum, allow_truncated=self._allow_truncated
        )
        return self._write(index)

    def index(self) -> TarIndex | None:
        index = index_files.looked_up(self.blob, self.place)
        return None if index is None else whole(index, self._allow_truncated)

    def build(self) -> TarIndex:
        return index_files.made(self.blob, allow_truncated=self._allow_truncated)

    def verify(self, index: TarIndex) -> None:
        index.verify(ObjectSource(self.blob))

    def _write(self, index: TarIndex) -> TarIndex:
        make_folder(Path(self.place).parent, "the folder of the index")
        array_container.write(self.place, index.serialize(ObjectSource(self.blob).version))
        return index


def find_tar_targets(
    sources: Sequence[str], folder: Path | None = None, *, allow_truncated: bool = False
) -> list[TarTarget]:
    """The tars of paths, URLs and patterns; ArgumentError if there are none."""
    if not has_urls(sources):
        return [LocalTar(path, folder, allow_truncated=allow_truncated) for path in _find_files(sources)]
    blobs = find(sources, "*.tar")
    return [
        RemoteTar(blob, folder, allow_truncated=allow_truncated)
        if isinstance(blob, RemoteBlob)
        else LocalTar(blob.name, folder, allow_truncated=allow_truncated)
        for blob in blobs
    ]


def has_urls(sources: Sequence[str]) -> bool:
    """True if any source is a URL."""
    return any("://" in source for source in sources)


def _find_files(sources: Sequence[str]) -> list[str]:
    tars = find_tars(sources)
    if not tars:
        raise ArgumentError(f"no .tar files in {', '.join(sources)}")
    return tars


_REMOTE_THREADS = 8
"""Threads that read objects: they mostly wait, so their number does not depend on the CPUs."""


BAD = "bad"


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Options of `feedline index`.

    `check` writes nothing; `rebuild` replaces valid indexes; `checksum` stores one in each index. Indexes go to the
    folder `into`. By default they go next to files; for objects, to the user's cache folder.
    """

    check: bool = False
    rebuild: bool = False
    checksum: bool = False
    allow_truncated: bool = False
    into: Path | None = None


@dataclass(frozen=True, slots=True)
class IndexResult:
    """Result for one tar.

    `state` is "built", "valid", "checked", or "bad" with a `problem`.
    """

    tar: str
    state: str
    samples: int = 0
    problem: str = ""
    index: str = ""

    def summary(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return asdict(self)


def run(sources: Sequence[str], settings: IndexSettings, workers: int | None, console: Console) -> list[IndexResult]:
    """Index or check all tars, and print a summary.

    A tar that cannot be read gives a bad result; the others are processed.
    """
    tars = find_tar_targets(sources, settings.into, allow_truncated=settings.allow_truncated)
    threads = workers or (_REMOTE_THREADS if has_urls(sources) else usable_cpus())
    results = list[IndexResult]()
    with bars(console) as step, WorkAhead(lambda tar: process(tar, settings), tars, threads) as work:
        for result in work:
            results.append(result)
            step("checking" if settings.check else "indexing", len(results), len(tars))
    console.print(render(results))
    return results


def process(tar: TarTarget, settings: IndexSettings) -> IndexResult:
    """Build the index of one tar, or check it."""
    try:
        return _check(tar) if settings.check else _make(tar, settings)
    except (SampleError, OSError) as error:
        return IndexResult(tar.name, BAD, problem=str(error))


def _make(tar: TarTarget, settings: IndexSettings) -> IndexResult:
    head = None if settings.rebuild else tar.head()
    if head is not None and (head.blake2b or not settings.checksum):
        return IndexResult(tar.name, "valid", head.samples, index=tar.place)
    return IndexResult(tar.name, "built", len(tar.make(checksum=settings.checksum)), index=tar.place)


def _check(tar: TarTarget) -> IndexResult:
    """Compare the tar with its index, if possible by its checksum.

    Without a checksum the index is built again in memory.
    """
    index = tar.index()
    if index is None:
        return IndexResult(tar.name, BAD, problem=f"{tar.name} has no index. Build it: feedline index {tar.name}")
    if index.head.blake2b is not None:
        tar.verify(index)
    elif not _is_same(index, tar.build()):
        problem = f"the index of {tar.name} does not match the tar. Rebuild it: feedline index --rebuild {tar.name}"
        return IndexResult(tar.name, BAD, problem=problem)
    return IndexResult(tar.name, "checked", len(index), index=index.path or "")


def _is_same(index: TarIndex, other: TarIndex) -> bool:
    return (
        index.fields == other.fields
        and list(index.keys) == list(other.keys)
        and np.array_equal(index.blocks, other.blocks)
        and np.array_equal(index.sizes, other.sizes)
    )


def render(results: Sequence[IndexResult]) -> Table:
    """A table of counts per state, followed by each problem."""
    table = Table(box=box.ROUNDED)
    table.add_column("")
    table.add_column("shards", justify="right")
    table.add_column("samples", justify="right")
    for state in dict.fromkeys(result.state for result in results if result.state != BAD):
        samples = [result.samples for result in results if result.state == state]
        table.add_row(state, f"{len(samples):,}", f"{sum(samples):,}")
    bad = [result for result in results if result.state == BAD]
    if bad:
        table.add_row(Text(BAD, style="bold red"), f"{len(bad):,}", "")
        table.caption = Text("\n".join(result.problem for result in bad), style="red", overflow="fold")
        table.caption_justify = "left"
    return table
