"""`feedline inspect` from what lies there to what is shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feedline.cli.inspect import contact_sheet, show
from feedline.cli.inspect.formats import format_of
from feedline.cli.inspect.order import Ordered, ordered
from feedline.cli.inspect.survey import survey, tar_summary
from feedline.cli.progress import bars
from feedline.datasets.formats import Format, ShardSummary
from feedline.datasets.shard_summaries import summarize, unsharded
from feedline.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many samples to look into (0: all), the sheet to write and its samples, window and batch size to judge."""

    limit: int = 0
    sheet: Path | None = None
    sheet_samples: int = 24
    order: tuple[int, int] | None = None


def run(sources: Sequence[str], wanted: Wanted, console: Console) -> tuple[dict[str, Any], bool]:
    """Survey, show, and draw; gives the summary, and whether all that was looked at can be read."""
    format_ = format_of(sources)
    if format_.lists_samples:
        return _surveyed(format_, sources, wanted, console)
    if wanted.sheet is not None:
        raise ArgumentError(
            f"--contact-sheet shows pictures of folders and .tar files; {', '.join(sources)}: {format_.label}"
        )
    shards = summarize(format_, sources)
    order = _ordered(shards, wanted)
    console.print(show.shards_shown(format_.label, shards, order))
    return show.shards_summary(format_.label, shards, order), True


def _surveyed(format_: Format, sources: Sequence[str], wanted: Wanted, console: Console) -> tuple[dict[str, Any], bool]:
    with bars(console) as step:
        found = survey(sources, wanted.limit, step)
    sizes = found.listing.shards
    shards = tar_summary(sizes, found.nbytes) if sizes else unsharded(len(found.listing.samples))
    order = _ordered(shards, wanted)
    if wanted.order and shards.note:
        found.listing.notes.append(shards.note)
    console.print(show.shown(found, order))
    if wanted.sheet is not None:
        number = contact_sheet.write(found.listing, wanted.sheet, wanted.sheet_samples)
        console.print(f"{show.counted(number, 'sample')} on {wanted.sheet}", highlight=False)
    return show.summary(format_.label, found, order), found.healthy


def _ordered(shards: ShardSummary, wanted: Wanted) -> Ordered | None:
    return ordered(shards, *wanted.order) if wanted.order else None
