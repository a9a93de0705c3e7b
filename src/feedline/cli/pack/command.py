"""`feedline pack`: progress bars and a summary around `pack`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from feedline.cli import pack
from feedline.cli.progress import bars, format_bytes
from feedline.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from feedline.cli.pack import PackOptions, PackResult


_MOST_SHOWN = 10


def run(paths: Sequence[str], options: PackOptions, workers: int, console: Console) -> PackResult:
    """Pack all paths but the last into the last.

    Shows progress and a summary on `console`.
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
    table.add_row("shards", f"{len(shards):,}, {format_bytes(sum(shard.nbytes for shard in shards))}")
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
