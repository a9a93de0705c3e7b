"""`feedline index`: build and check index files of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from feedline.cli.arguments import AsJson, Workers, print_json
from feedline.cli.inspect.formats import format_of
from feedline.cli.progress import bars
from feedline.core.threads import WorkAhead
from feedline.datasets.formats import FORMATS, Format, load
from feedline.datasets.sample_lists import IndexTarget
from feedline.errors import ArgumentError, SampleError, StateError
from feedline.loader.monitoring.resources import usable_cpus
from feedline.stores.urls import is_local

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
    """Result for one shard.

    `state` is "built", "valid", "checked", or "bad" with a `problem`.
    """

    shard: str
    state: str
    samples: int = 0
    problem: str = ""
    index: str = ""

    def summary(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return asdict(self)


def run(sources: Sequence[str], settings: IndexSettings, workers: int | None, console: Console) -> list[IndexResult]:
    """Index or check all shards, and print a summary.

    A shard that cannot be read gives a bad result; the others are processed.
    """
    targets = load(_indexed_format(sources).index_targets)(sources, settings.into, settings.allow_truncated)
    threads = workers or (usable_cpus() if all(map(is_local, sources)) else _REMOTE_THREADS)
    results = list[IndexResult]()
    with bars(console) as step, WorkAhead(lambda target: process(target, settings), targets, threads) as work:
        for result in work:
            results.append(result)
            step("checking" if settings.check else "indexing", len(results), len(targets))
    console.print(render(results))
    return results


def _indexed_format(sources: Sequence[str]) -> Format:
    """The format of the sources; `ArgumentError` if this command cannot index it."""
    found = format_of(sources)
    if found.index_targets is None:
        formats = ", ".join(each.label for each in FORMATS.values() if each.index_targets)
        raise ArgumentError(
            f"{', '.join(sources)}: {found.label} needs no index from this command, which writes those of {formats}"
        )
    return found


def process(target: IndexTarget, settings: IndexSettings) -> IndexResult:
    """Build or check the index of one shard; errors give bad results."""
    try:
        if settings.check:
            samples, place = target.check()
            return IndexResult(target.name, "checked", samples, index=place)
        known = None if settings.rebuild else target.known(checksum=settings.checksum)
        if known is not None:
            return IndexResult(target.name, "valid", known, index=target.place)
        return IndexResult(target.name, "built", target.write(checksum=settings.checksum), index=target.place)
    except (SampleError, StateError, OSError) as error:
        return IndexResult(target.name, BAD, problem=str(error))


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
    paths: Annotated[list[str], typer.Argument(metavar="SHARD", help="Shards or folders of them, as paths or URLs.")],
    into: Annotated[
        Path | None,
        typer.Option(
            help="Write indexes into this folder: the index of s3://bucket/a/0 as bucket/a/0 with its ending. Upload "
            "each one next to its object, or pass the folder to the dataset as index_dir=."
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
    """Build the index of each shard that has no valid one.

    Shards in object stores (s3://, gs://, az://, https://, ...) are read once, with credentials from the environment.
    Their indexes go to --into FOLDER, or else to the user's cache folder, where datasets find them.

    Exit code 1 if a shard cannot be indexed, or if its index is not valid.
    """
    settings = IndexSettings(check, rebuild, checksum, allow_truncated, into)
    results = run(paths, settings, workers, Console(stderr=as_json))
    if as_json:
        print_json([result.summary() for result in results])
    raise typer.Exit(1 if any(result.state == BAD for result in results) else 0)
