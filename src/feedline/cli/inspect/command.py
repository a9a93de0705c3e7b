"""`feedline inspect`: survey, summary, and contact sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from feedline.cli.arguments import AsJson, print_json
from feedline.cli.inspect import contact_sheet, show
from feedline.cli.inspect.formats import format_of
from feedline.cli.inspect.order import RankLayout, WindowComparison, compare_windows
from feedline.cli.inspect.survey import summarize_listing, survey
from feedline.cli.progress import bars
from feedline.datasets.formats import FORMATS, Format, ShardSummary
from feedline.datasets.shard_summaries import summarize, unsharded
from feedline.errors import ArgumentError
from feedline.stores import open_store
from feedline.stores.globs import expand


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
    ranks: RankLayout | None = None


def run(sources: Sequence[str], options: InspectOptions, console: Console) -> tuple[dict[str, Any], bool]:
    """Inspect the sources, and print the result.

    Returns the summary as a JSON object, and False if a shard, a class or an image cannot be read. Raises
    `ArgumentError` for sources of no or several formats, and for a path of the sheet that is no image.
    """
    if options.sheet is not None:
        contact_sheet.check_path(options.sheet)
    sources = expand(sources, open_store)  # a pattern in quotes, as the datasets take it
    format_ = format_of(sources)
    if format_.list_samples is not None:
        return _inspect_samples(format_, sources, options, console)
    if options.sheet is not None:
        labels = ", ".join(each.label for each in FORMATS.values() if each.list_samples is not None)
        raise ArgumentError(
            f"--contact-sheet draws samples of these formats only: {labels}; {', '.join(sources)}: {format_.label}"
        )
    shards = summarize(format_, sources)
    order = _judge_order(shards, options)
    console.print(show.render_shards(format_.label, shards, order))
    return show.shards_summary(format_.label, shards, order), True


def _inspect_samples(
    format_: Format, sources: Sequence[str], options: InspectOptions, console: Console
) -> tuple[dict[str, Any], bool]:
    with bars(console) as step:
        result = survey(format_, sources, options.limit, step)
    sizes = result.listing.shards
    shards = summarize_listing(format_.unit, sizes, result.nbytes) if sizes else unsharded(len(result.listing.samples))
    order = _judge_order(shards, options)
    if options.order and shards.note:
        result.listing.notes.append(shards.note)
    console.print(show.render(result, order))
    if options.sheet is not None:
        number = contact_sheet.write(result.listing, options.sheet, options.sheet_samples)
        console.print(f"{show.count_noun(number, 'sample')} on {options.sheet}", highlight=False)
    return show.summary(format_.label, result, order), result.healthy


def _judge_order(shards: ShardSummary, options: InspectOptions) -> WindowComparison | None:
    return compare_windows(shards, *options.order, options.ranks) if options.order else None


def command(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Files and folders of one format, as paths or URLs."),
    ],
    limit: Annotated[int, typer.Option(min=0, help="Number of samples to examine, evenly spaced. 0: all.")] = 20_000,
    contact_sheet: Annotated[
        Path | None, typer.Option(help="Draw samples with their classes into this image file (.png).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=600, help="Number of samples on the contact sheet.")] = 24,
    order: Annotated[
        bool, typer.Option("--order", help="Compare shuffle windows of shards: mixing, and bytes read.")
    ] = False,
    window: Annotated[int, typer.Option(min=1, help="Window for --order, in shards.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size for --order.")] = 256,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks that share the shards, for --order.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Machines on which these ranks run.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Summarize folders or shards: samples, fields, classes, sizes, formats and errors.

    Exit code 1 if a shard or an image cannot be read.
    """
    ranks = RankLayout(world_size, nodes) if world_size > 1 else None
    options = InspectOptions(limit, contact_sheet, samples, (window, batch_size) if order else None, ranks)
    summary, healthy = run(paths, options, Console(stderr=as_json))
    if as_json:
        print_json(summary)
    raise typer.Exit(0 if healthy else 1)
