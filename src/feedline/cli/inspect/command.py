"""`feedline inspect`: survey, summary, and contact sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feedline.cli.inspect import contact_sheet, show
from feedline.cli.inspect.formats import InspectedFormat, format_of
from feedline.cli.inspect.order import Ordered, ordered
from feedline.cli.inspect.shards import Shards, of_tars, shards_in, unsharded
from feedline.cli.inspect.survey import survey
from feedline.cli.progress import bars
from feedline.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """Options of `feedline inspect`.

    `limit` is the number of samples to examine, 0 for all; `order` is a window and a batch size.
    """

    limit: int = 0
    sheet: Path | None = None
    sheet_samples: int = 24
    order: tuple[int, int] | None = None


def run(sources: Sequence[str], options: InspectOptions, console: Console) -> tuple[dict[str, Any], bool]:
    """Inspect the sources, and print the result.

    Returns the summary as a JSON object, and False if a shard or an image cannot be read.
    """
    format_ = format_of(sources)
    if format_ in (InspectedFormat.FILES, InspectedFormat.TAR):
        return _inspect_samples(sources, options, console)
    if options.sheet is not None:
        raise ArgumentError(
            f"--contact-sheet draws images of folders and .tar files only; {', '.join(sources)} contains {format_}"
        )
    shards = shards_in(format_, sources)
    order = _judge_order(shards, options)
    console.print(show.render_shards(shards, order))
    return {**shards.summary(), "order": order.summary() if order else None}, True


def _inspect_samples(sources: Sequence[str], options: InspectOptions, console: Console) -> tuple[dict[str, Any], bool]:
    with bars(console) as step:
        result = survey(sources, options.limit, step)
    sizes = result.listing.shards
    shards = of_tars(sizes, result.nbytes) if sizes else unsharded(InspectedFormat.FILES, len(result.listing.samples))
    order = _judge_order(shards, options)
    if options.order and shards.note:
        result.listing.notes.append(shards.note)
    console.print(show.render(result, order))
    if options.sheet is not None:
        number = contact_sheet.write(result.listing, options.sheet, options.sheet_samples)
        console.print(f"{show.count_noun(number, 'sample')} on {options.sheet}", highlight=False)
    return show.summary(result, order), result.healthy


def _judge_order(shards: Shards, options: InspectOptions) -> Ordered | None:
    return ordered(shards, *options.order) if options.order else None
