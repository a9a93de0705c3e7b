"""`feedline index`: the side-car indexes of tar shards, made where they are missing, or checked.

Tars that a command is given, on this machine or in stores, and their indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from feedline.cli.pack import measured, tars_of
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
    """One tar, and its index on this machine."""

    name: str
    """Its path or address."""
    place: str
    """Where its index is kept."""

    def head(self) -> Head | None:
        """What the index that is there tells; None if there is none that fits."""
        ...

    def make(self, *, checksum: bool) -> TarIndex:
        """Make the index anew, grids included, and write it to its place."""
        ...

    def index(self) -> TarIndex | None:
        """The index that is there; None if there is none."""
        ...

    def built(self) -> TarIndex:
        """The index, made anew in memory."""
        ...

    def verify(self, index: TarIndex) -> None:
        """ShardError if the tar has not the checksum that its index tells."""
        ...


class LocalTar:
    """A file, whose index lies beside it, or in the folder."""

    def __init__(self, path: str, folder: Path | None, *, allow_truncated: bool) -> None:
        self.name = path
        self.place = places(str(Path(path).absolute()), folder)[0]
        self._folder = folder
        self._allow_truncated = allow_truncated

    def head(self) -> Head | None:
        """What the index that is there tells; None if there is none that fits."""
        path = str(Path(self.name).absolute())
        return glance(path, folder=self._folder, allow_truncated=self._allow_truncated)

    def make(self, *, checksum: bool) -> TarIndex:
        """Make the index anew, grids included, and write it to its place."""
        make_folder(Path(self.place).parent, "the folder of the index")
        write_index(self.name, self.place, measure=measured, checksum=checksum, allow_truncated=self._allow_truncated)
        return open_index(self.name, self.place, allow_truncated=self._allow_truncated)

    def index(self) -> TarIndex | None:
        """The index that is there; None if there is none, ShardError if it does not fit."""
        if not Path(self.place).is_file():
            return None
        return open_index(self.name, self.place, allow_truncated=self._allow_truncated)

    def built(self) -> TarIndex:
        """The index, made anew in memory."""
        return build_index(self.name, allow_truncated=self._allow_truncated)

    def verify(self, index: TarIndex) -> None:
        """ShardError if the tar has not the checksum that its index tells."""
        index.verify()


class RemoteTar:
    """An object, whose index lies in the folder, else where datasets look for it on this machine, or beside it."""

    def __init__(self, blob: RemoteBlob, folder: Path | None, *, allow_truncated: bool) -> None:
        self.name = blob.name
        self.place = places(blob.name, folder)[0]
        self.blob = blob
        self._allow_truncated = allow_truncated

    def head(self) -> Head | None:
        """What the index that is there tells, which is kept at its place; None if there is none that fits."""
        head = head_at(self.place, ObjectSource(self.blob).version)
        if head is None:
            index = index_files.looked_up(self.blob, self.place)
            head = None if index is None else self._written(index).head
        return head if head is None or head.cut is None or self._allow_truncated else None

    def make(self, *, checksum: bool) -> TarIndex:
        """Make the index anew, grids included, and write it to its place."""
        index = index_files.made(self.blob, measure=measured, checksum=checksum, allow_truncated=self._allow_truncated)
        return self._written(index)

    def index(self) -> TarIndex | None:
        """The index that is there; None if there is none that fits."""
        index = index_files.looked_up(self.blob, self.place)
        return None if index is None else whole(index, self._allow_truncated)

    def built(self) -> TarIndex:
        """The index, made anew in memory."""
        return index_files.made(self.blob, allow_truncated=self._allow_truncated)

    def verify(self, index: TarIndex) -> None:
        """ShardError if the object has not the checksum that its index tells."""
        index.verify(ObjectSource(self.blob))

    def _written(self, index: TarIndex) -> TarIndex:
        make_folder(Path(self.place).parent, "the folder of the index")
        array_container.write(self.place, index.written(ObjectSource(self.blob).version))
        return index


def tars_at(sources: Sequence[str], folder: Path | None = None, *, allow_truncated: bool = False) -> list[TarTarget]:
    """The tars that paths, addresses and patterns mean; ArgumentError if there are none. Indexes lie in `folder`."""
    if not is_far(sources):
        return [LocalTar(path, folder, allow_truncated=allow_truncated) for path in _files(sources)]
    blobs = find(sources, "*.tar")
    return [
        RemoteTar(blob, folder, allow_truncated=allow_truncated)
        if isinstance(blob, RemoteBlob)
        else LocalTar(blob.name, folder, allow_truncated=allow_truncated)
        for blob in blobs
    ]


def is_far(sources: Sequence[str]) -> bool:
    """Whether there are addresses among the sources."""
    return any("://" in source for source in sources)


def _files(sources: Sequence[str]) -> list[str]:
    tars = tars_of(sources)
    if not tars:
        raise ArgumentError(f"{', '.join(sources)} hold no .tar files")
    return tars


_FAR_AT_ONCE = 8
"""Objects are waited for: there is no use in as few threads as there are CPUs."""


BAD = "bad"


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """`check` only looks; `rebuild` makes indexes anew that fit; `checksum` stores that of the tar in them.

    They lie in the folder `into`; by default beside files, and for objects where datasets look on this machine.
    """

    check: bool = False
    rebuild: bool = False
    checksum: bool = False
    allow_truncated: bool = False
    into: Path | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """One tar and where its index is: `state` is "made", "fits", "checked" or "bad"; then `problem` says why."""

    tar: str
    state: str
    samples: int = 0
    problem: str = ""
    index: str = ""

    def summary(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def run(sources: Sequence[str], settings: IndexSettings, workers: int | None, console: Console) -> list[Judged]:
    """Index or check the tars, or those in folders; a tar that cannot be read is told, and the others are done."""
    tars = tars_at(sources, settings.into, allow_truncated=settings.allow_truncated)
    threads = workers or (_FAR_AT_ONCE if is_far(sources) else usable_cpus())
    judged = list[Judged]()
    with bars(console) as step, WorkAhead(lambda tar: judge(tar, settings), tars, threads) as results:
        for result in results:
            judged.append(result)
            step("checking" if settings.check else "indexing", len(judged), len(tars))
    console.print(shown(judged))
    return judged


def judge(tar: TarTarget, settings: IndexSettings) -> Judged:
    """Make the index of one tar, or check it."""
    try:
        return _checked(tar) if settings.check else _made(tar, settings)
    except (SampleError, OSError) as error:
        return Judged(tar.name, BAD, problem=str(error))


def _made(tar: TarTarget, settings: IndexSettings) -> Judged:
    head = None if settings.rebuild else tar.head()
    if head is not None and (head.blake2b or not settings.checksum):
        return Judged(tar.name, "fits", head.samples, index=tar.place)
    return Judged(tar.name, "made", len(tar.make(checksum=settings.checksum)), index=tar.place)


def _checked(tar: TarTarget) -> Judged:
    """By the checksum, if the index holds one; else by making the index again and comparing."""
    index = tar.index()
    if index is None:
        return Judged(tar.name, BAD, problem=f"{tar.name} has no index. Make it: feedline index {tar.name}")
    if index.head.blake2b is not None:
        tar.verify(index)
    elif not _same(index, tar.built()):
        problem = (
            f"the index of {tar.name} is not what the tar holds. Make it anew: feedline index --rebuild {tar.name}"
        )
        return Judged(tar.name, BAD, problem=problem)
    return Judged(tar.name, "checked", len(index), index=index.path or "")


def _same(index: TarIndex, other: TarIndex) -> bool:
    return (
        index.fields == other.fields
        and list(index.keys) == list(other.keys)
        and np.array_equal(index.blocks, other.blocks)
        and np.array_equal(index.sizes, other.sizes)
    )


def shown(judged: Sequence[Judged]) -> Table:
    """How many tars of each state, then each bad one with its remedy."""
    table = Table(box=box.ROUNDED)
    table.add_column("")
    table.add_column("shards", justify="right")
    table.add_column("samples", justify="right")
    for state in dict.fromkeys(one.state for one in judged if one.state != BAD):
        group = [one.samples for one in judged if one.state == state]
        table.add_row(state, f"{len(group):,}", f"{sum(group):,}")
    bad = [one for one in judged if one.state == BAD]
    if bad:
        table.add_row(Text(BAD, style="bold red"), f"{len(bad):,}", "")
        table.caption = Text("\n".join(one.problem for one in bad), style="red", overflow="fold")
        table.caption_justify = "left"
    return table
