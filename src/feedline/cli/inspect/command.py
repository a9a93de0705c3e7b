"""`feedline inspect` from the survey to what is shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feedline.cli.inspect import sheet, show
from feedline.cli.inspect.order import ordered
from feedline.cli.inspect.survey import survey
from feedline.cli.progress import bars

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
    with bars(console) as step:
        found = survey(sources, wanted.limit, step)
    order = ordered(found.listing.shards, found.nbytes, *wanted.order) if wanted.order else None
    console.print(show.shown(found, order))
    if wanted.sheet is not None:
        number = sheet.write(found.listing, wanted.sheet, wanted.sheet_samples)
        console.print(f"{number} samples are on {wanted.sheet}", highlight=False)
    return show.summary(found, order), found.healthy
