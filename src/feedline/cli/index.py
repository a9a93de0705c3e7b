"""`feedline index`: build and check index files of tar shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from feedline.cli.arguments import AsJson, Workers, print_json
from feedline.cli.pack import find_tars, measure_intervals
from feedline.cli.progress import bars
from feedline.core.paths import make_folder
from feedline.core.threads import WorkAhead
from feedline.datasets.formats import FORMATS
from feedline.datasets.inflated import inflated
from feedline.datasets.paths import find
from feedline.datasets.webdataset import Head, TarIndex, build_index, glance, open_index
from feedline.datasets.webdataset.index_files import find_index, places, whole
from feedline.datasets.webdataset.sources import TarSource
from feedline.datasets.webdataset.tar import opener_of
from feedline.errors import ArgumentError, SampleError, StateError
from feedline.loader.resources import usable_cpus
from feedline.stores.files import File, FileSet, local_info
from feedline.stores.urls import is_local


@dataclass(frozen=True, slots=True)
class TarTarget:
    """A tar shard and the folder of its index.

    Without a folder, indexes of files lie next to them, those of objects in the user's cache folder.
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
        return places(self.name, self.folder)[0]

    @property
    def blob(self) -> File | None:
        """The tar as an object or as content; None for a file."""
        blob = self.source.file
        return blob if blob.local_path is None else None

    def head(self) -> Head | None:
        """Header of the existing index; None without a valid one.

        An index next to an object is copied to `place`.
        """
        known = partial(
            glance, self.name, self.source.version, index_dir=self.folder, allow_truncated=self.allow_truncated
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
            return None if index is None else whole(index, self.allow_truncated)
        if not Path(self.place).is_file():
            return None
        return open_index(self.source, self.place, allow_truncated=self.allow_truncated)

    def build(self) -> TarIndex:
        """Build the index in memory, without grids."""
        return build_index(self.source, allow_truncated=self.allow_truncated)


def find_tar_targets(
    sources: Sequence[str], folder: Path | None = None, *, allow_truncated: bool = False
) -> list[TarTarget]:
    """The tars of paths, URLs and patterns; ArgumentError if there are none.

    Compressed ones are decompressed as `TarShards` does.
    """
    if has_urls(sources) or has_compressed(sources):
        stored = find(sources, FORMATS["tar"].pattern)
        tars = inflated(stored, [opener_of(name) for name in stored.names], None)
    else:
        tars = FileSet([(None, local_info(str(Path(path).absolute()))) for path in _find_files(sources)])
    return [TarTarget(TarSource(tars, number), folder, allow_truncated) for number in range(len(tars))]


def has_urls(sources: Sequence[str]) -> bool:
    """True if any source is a URL."""
    return any("://" in source for source in sources)


def has_compressed(sources: Sequence[str]) -> bool:
    """True if any local source is, or holds, a compressed tar."""
    found = [path for each in map(Path, sources) for path in (each.iterdir() if each.is_dir() else [each])]
    tar = FORMATS["tar"]
    return any(tar.matches(path.name) and opener_of(path.name) is not None for path in found)


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

    `check` writes nothing; `rebuild` replaces valid indexes; `checksum` stores a checksum in each index. Indexes are
    written to the folder `into`; by default next to files, and for objects to the user's cache folder.
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
    except (SampleError, StateError, OSError) as error:
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
        index.verify(tar.source)
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


def command(
    paths: Annotated[
        list[str], typer.Argument(metavar="SHARD", help="Tar shards or folders of them, as paths or URLs.")
    ],
    into: Annotated[
        Path | None,
        typer.Option(
            help="Write indexes into this folder: the index of s3://bucket/a/0.tar as bucket/a/0.tar.index. Upload "
            "each one next to its object, or pass the folder to TarShards as index_dir=."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare shards with their indexes, and write nothing.")
    ] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Rebuild all indexes, even valid ones.")] = False,
    checksum: Annotated[bool, typer.Option("--checksum", help="Store a checksum of the shard in its index.")] = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Index the complete samples of a truncated shard.")
    ] = False,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Build the index of each tar shard that has no valid one.

    Shards in object stores (s3://, gs://, az://, https://, ...) are read once, with credentials from the environment.
    Their indexes go to --into FOLDER, or else to the user's cache folder, where datasets find them.

    Exit code 1 if a shard cannot be indexed, or if its index is not valid.
    """
    settings = IndexSettings(check, rebuild, checksum, allow_truncated, into)
    results = run(paths, settings, workers, Console(stderr=as_json))
    if as_json:
        print_json([result.summary() for result in results])
    raise typer.Exit(1 if any(result.state == BAD for result in results) else 0)
