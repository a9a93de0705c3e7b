"""`feedline pack`: progress bars and a summary around `pack`."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from feedline.cli import pack
from feedline.cli.arguments import AsJson, Workers, print_json
from feedline.cli.pack import PackOptions, PackResult, ShardSize
from feedline.cli.progress import bars
from feedline.errors import ArgumentError
from feedline.loader.monitoring.resources import usable_cpus
from feedline.loader.report.stats import size

_MOST_SHOWN = 10


def run(paths: Sequence[str], options: PackOptions, workers: int, console: Console) -> PackResult:
    """Pack all paths but the last into the last, a folder.

    `console` shows progress and a summary. Raises `ArgumentError` for fewer than two paths.
    """
    if len(paths) < 2:
        raise ArgumentError("feedline pack needs sources and a folder for the shards: feedline pack SOURCE... DEST")
    *sources, folder = paths
    with bars(console) as step:
        result = pack.pack(
            sources,
            Path(folder),
            options,
            workers,
            lambda progress: step(progress.phase, progress.done, progress.total),
        )
    console.print(render(result))
    return result


def summary(result: PackResult) -> dict[str, Any]:
    """The result as a JSON object."""
    shards = result.manifest.shards
    return {
        "folder": str(result.folder),
        "samples": sum(shard.samples for shard in shards),
        "nbytes": sum(shard.nbytes for shard in shards),
        "shards": [{"name": s.name, "samples": s.samples, "nbytes": s.nbytes, "sha256": s.sha256} for s in shards],
        "kept_shards": result.kept,
        "skipped": result.skipped,
        "without_grid": dict(result.without_grid),
        "notes": result.notes,
    }


def render(result: PackResult) -> RenderableType:
    """The result as text that fits 40 columns."""
    shards = result.manifest.shards
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("folder", Text(str(result.folder)))
    table.add_row("samples", f"{sum(shard.samples for shard in shards):,}")
    table.add_row("shards", f"{len(shards):,}, {size(sum(shard.nbytes for shard in shards))}")
    if result.kept:
        table.add_row("", f"{result.kept:,} of them from an earlier run")
    for note in result.notes:
        table.add_row("note", Text(note))
    parts: list[RenderableType] = [table]
    if result.without_grid:
        parts.append(_render_without_grid(result.without_grid))
    if result.skipped:
        parts.append(_render_skipped(result.skipped))
    return Group(*parts)


def _render_without_grid(reasons: Counter[str]) -> RenderableType:
    table = Table(box=box.ROUNDED, title="Unchanged images, without a grid", title_justify="left")
    table.add_column("images", justify="right")
    table.add_column("reason", overflow="fold")
    for reason, number in reasons.most_common():
        table.add_row(f"{number:,}", Text(reason))
    return table


def _render_skipped(skipped: Sequence[dict[str, str]]) -> RenderableType:
    lines = [Text(f"{len(skipped):,} samples were left out:", style="bold yellow")]
    lines += [Text(f"· {skip['error']}", overflow="fold") for skip in skipped[:_MOST_SHOWN]]
    if len(skipped) > _MOST_SHOWN:
        lines.append(Text(f"… and {len(skipped) - _MOST_SHOWN:,} more: see {pack.MANIFEST}"))
    return Group(*lines)


class OnError(enum.StrEnum):
    """Actions on a sample that cannot be read."""

    RAISE = "raise"
    SKIP = "skip"


def command(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Sources (folders or tar shards), then the folder for the new shards."),
    ],
    shard_size: Annotated[
        str, typer.Option(help="Largest shard, in bytes (256MB, 1GiB) or samples (10000).")
    ] = "256MB",
    grid: Annotated[
        bool, typer.Option("--grid", help="Rewrite JPEGs losslessly, so that a crop reads and decodes only its part.")
    ] = False,
    shorter_side: Annotated[
        int | None, typer.Option(min=1, help="Shrink larger images to this shorter side, in pixels.")
    ] = None,
    quality: Annotated[int | None, typer.Option(min=1, max=100, help="Re-encode images as JPEG.")] = None,
    decoded: Annotated[
        bool, typer.Option("--decoded", help="Store pixels: no decoding in training, several times the disk space.")
    ] = False,
    field: Annotated[
        list[str] | None,
        typer.Option(help="Image field to change, if samples have several. Repeat it for more."),
    ] = None,
    shuffle: Annotated[
        bool | None, typer.Option("--shuffle/--no-shuffle", help="Default: shuffle class folders only.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the shuffled order.")] = 0,
    on_error: Annotated[
        OnError,
        typer.Option(help="Action on a sample that cannot be read: stop, or leave it out and list it."),
    ] = OnError.RAISE,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Pack folders of files, or existing shards, into WebDataset tar shards.

    Run the same command again to continue an interrupted run.
    """
    options = PackOptions(
        ShardSize.parse(shard_size),
        shorter_side=shorter_side,
        quality=quality,
        grid=grid,
        decoded=decoded,
        fields=tuple(field or ()),
        shuffle=shuffle,
        seed=seed,
        skip=on_error is OnError.SKIP,
    )
    result = run(paths, options, workers or usable_cpus(), Console(stderr=as_json))
    if as_json:
        print_json(summary(result))
