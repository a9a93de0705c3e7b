"""`feedline inspect`: survey, summary, and contact sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feedline.cli.inspect import contact_sheet, show
from feedline.cli.inspect.formats import format_of
from feedline.cli.inspect.order import Ordered, Ranks, ordered
from feedline.cli.inspect.survey import survey, tar_summary
from feedline.cli.progress import bars
from feedline.datasets.formats import Format, ShardSummary
from feedline.datasets.shard_summaries import summarize, unsharded
from feedline.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """Options of `feedline inspect`.

    `limit` is the number of samples to examine, 0 for all; `order` is a window and a batch size;
    with `ranks`, shards are divided among them.
    """

    limit: int = 0
    sheet: Path | None = None
    sheet_samples: int = 24
    order: tuple[int, int] | None = None
    ranks: Ranks | None = None


def run(sources: Sequence[str], options: InspectOptions, console: Console) -> tuple[dict[str, Any], bool]:
    """Inspect the sources, and print the result.

    Returns the summary as a JSON object, and False if a shard or an image cannot be read.
    """
    format_ = format_of(sources)
    if format_.lists_samples:
        return _inspect_samples(format_, sources, options, console)
    if options.sheet is not None:
        raise ArgumentError(
            f"--contact-sheet draws images of folders and .tar files only; {', '.join(sources)}: {format_.label}"
        )
    shards = summarize(format_, sources)
    order = _judge_order(shards, options)
    console.print(show.render_shards(format_.label, shards, order))
    return show.shards_summary(format_.label, shards, order), True


def _inspect_samples(
    format_: Format, sources: Sequence[str], options: InspectOptions, console: Console
) -> tuple[dict[str, Any], bool]:
    with bars(console) as step:
        result = survey(sources, options.limit, step)
    sizes = result.listing.shards
    shards = tar_summary(sizes, result.nbytes) if sizes else unsharded(len(result.listing.samples))
    order = _judge_order(shards, options)
    if options.order and shards.note:
        result.listing.notes.append(shards.note)
    console.print(show.render(result, order))
    if options.sheet is not None:
        number = contact_sheet.write(result.listing, options.sheet, options.sheet_samples)
        console.print(f"{show.count_noun(number, 'sample')} on {options.sheet}", highlight=False)
    return show.summary(format_.label, result, order), result.healthy


def _judge_order(shards: ShardSummary, options: InspectOptions) -> Ordered | None:
    return ordered(shards, *options.order, options.ranks) if options.order else None
