"""`feedline pack`: what it shows while it works and when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from feedline.cli import pack
from feedline.cli.progress import bars, told_bytes
from feedline.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from feedline.cli.pack import PackOptions, PackResult


_MOST_SHOWN = 10


def run(paths: Sequence[str], options: PackOptions, workers: int, console: Console) -> PackResult:
    """Pack all paths but the last into the last, with bars and a summary on `console`."""
    if len(paths) < 2:
        raise ArgumentError("feedline pack needs sources and a folder for the shards: feedline pack SOURCE... DEST")
    *sources, folder = paths
    with bars(console) as step:
        outcome = pack.pack(
            sources, Path(folder), options, workers, lambda told: step(told.phase, told.done, told.total)
        )
    console.print(shown(outcome))
    return outcome


def summary(outcome: PackResult) -> dict[str, Any]:
    """The outcome as JSON holds it."""
    shards = outcome.manifest.shards
    return {
        "folder": str(outcome.folder),
        "samples": sum(shard.samples for shard in shards),
        "nbytes": sum(shard.nbytes for shard in shards),
        "shards": [{"name": s.name, "samples": s.samples, "nbytes": s.nbytes, "sha256": s.sha256} for s in shards],
        "kept_shards": outcome.kept,
        "skipped": outcome.skipped,
        "without_grid": dict(outcome.plain),
        "notes": outcome.notes,
    }


def shown(outcome: PackResult) -> RenderableType:
    """The outcome in words; it reads in 60 columns."""
    told = summary(outcome)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("folder", Text(told["folder"]))
    table.add_row("samples", f"{told['samples']:,}")
    table.add_row("shards", f"{len(told['shards']):,}, {told_bytes(told['nbytes'])}")
    if outcome.kept:
        table.add_row("", f"{outcome.kept:,} of them kept from an earlier run")
    for note in outcome.notes:
        table.add_row("note", Text(note))
    parts: list[RenderableType] = [table]
    if outcome.plain:
        parts.append(_without_grid(outcome))
    if outcome.skipped:
        parts.append(_skipped(outcome.skipped))
    return Group(*parts)


def _without_grid(outcome: PackResult) -> RenderableType:
    table = Table(box=box.ROUNDED, title="Pictures kept as they were, without a grid", title_justify="left")
    table.add_column("pictures", justify="right")
    table.add_column("why", overflow="fold")
    for reason, number in outcome.plain.most_common():
        table.add_row(f"{number:,}", Text(reason))
    return table


def _skipped(skipped: Sequence[dict[str, str]]) -> RenderableType:
    lines = [Text(f"{len(skipped):,} samples were left out:", style="bold yellow")]
    lines += [Text(f"· {skip['error']}", overflow="fold") for skip in skipped[:_MOST_SHOWN]]
    if len(skipped) > _MOST_SHOWN:
        lines.append(Text(f"… and {len(skipped) - _MOST_SHOWN:,} more: see {pack.MANIFEST}"))
    return Group(*lines)
