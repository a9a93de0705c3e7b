"""The commands and their options."""

from __future__ import annotations

import enum
import json
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from feedline.cli import doctor as checks
from feedline.cli import index as indexing
from feedline.cli.inspect import command as inspecting
from feedline.cli.pack import PackOptions, ShardSize
from feedline.cli.pack import command as packer
from feedline.errors import FeedlineError
from feedline.loader.resources import usable_cpus

app = typer.Typer(
    help="Pack, index and inspect training data, and check what this machine gives a loader.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Workers = Annotated[int | None, typer.Option(min=1, help="Threads; default: one per CPU.")]


AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to standard output, and the rest to standard error.")
]


class OnError(enum.StrEnum):
    """What a bad sample does to `feedline pack`."""

    RAISE = "raise"
    SKIP = "skip"


def main() -> None:
    """Run the command line; an error that feedline explains is printed without a traceback, exit code 2."""
    try:
        app()
    except (FeedlineError, OSError) as error:
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        Console(stderr=True).print(Text.assemble(("feedline: ", "bold red"), told), soft_wrap=True)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"feedline {installed_version('feedline')}")
        raise typer.Exit


@app.callback()
def feedline(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and leave.")
    ] = False,
) -> None:
    """What every command shares."""


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine gives feedline, and what to do where that is too little.

    Exit code 1 when something is bad.
    """
    findings = checks.examine()
    if as_json:
        typer.echo(json.dumps([finding.summary() for finding in findings], indent=2))
    else:
        Console().print(checks.shown(findings))
    raise typer.Exit(1 if any(finding.verdict is checks.Severity.BAD for finding in findings) else 0)


@app.command()
def pack(
    paths: Annotated[
        list[str], typer.Argument(metavar="SOURCE... DEST", help="Folders or tar shards; last, where the shards go.")
    ],
    shard_size: Annotated[str, typer.Option(help="Bytes (256MB, 1GiB) or samples (10000) of a shard.")] = "256MB",
    grid: Annotated[
        bool, typer.Option("--grid", help="Rewrite JPEGs, losslessly, so that a crop reads and decodes its part only.")
    ] = False,
    shorter_side: Annotated[
        int | None, typer.Option(min=1, help="Shrink pictures to this shorter side, in pixels.")
    ] = None,
    quality: Annotated[int | None, typer.Option(min=1, max=100, help="Re-encode pictures as JPEG.")] = None,
    decoded: Annotated[
        bool, typer.Option("--decoded", help="Store pixels, ready to be mapped: several times the disk, no decoding.")
    ] = False,
    field: Annotated[
        list[str] | None, typer.Option(help="The pictures to change, where samples have several; may be repeated.")
    ] = None,
    shuffle: Annotated[
        bool | None, typer.Option("--shuffle/--no-shuffle", help="Default: shuffle folders of classes only.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides the shuffled order.")] = 0,
    on_error: Annotated[
        OnError,
        typer.Option(help="Samples that cannot be read: stop, or leave them out and list them."),
    ] = OnError.RAISE,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Pack folders of files, or existing shards, as tar shards that any WebDataset reader reads.

    A run that was interrupted goes on where it stopped when it is started again.
    """
    options = PackOptions(
        ShardSize.parsed(shard_size),
        shorter_side=shorter_side,
        quality=quality,
        grid=grid,
        decoded=decoded,
        fields=tuple(field or ()),
        shuffle=shuffle,
        seed=seed,
        skip=on_error is OnError.SKIP,
    )
    outcome = packer.run(paths, options, workers or usable_cpus(), Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(packer.summary(outcome), indent=2))


@app.command()
def index(
    paths: Annotated[
        list[str], typer.Argument(metavar="SHARDS...", help="Tar shards, or folders of them; addresses, too.")
    ],
    into: Annotated[
        Path | None,
        typer.Option(
            help="Write indexes into this folder: that of s3://bucket/a/0.tar as bucket/a/0.tar.index. Put it beside "
            "the object, or give the folder to TarShards as index_dir=."
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare tars with their indexes.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make indexes anew, even those that fit.")] = False,
    checksum: Annotated[bool, typer.Option("--checksum", help="Store a checksum of the tar in its index.")] = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Index the samples before the end of a tar that was cut off.")
    ] = False,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Make the index beside each tar shard, where there is none that fits.

    Tars in stores (s3://, gs://, az://, https://, ...) are read once, with credentials from the environment; their
    indexes are written into --into FOLDER, or else kept for datasets on this machine.

    Exit code 1 when a shard cannot be indexed, or its index does not fit.
    """
    settings = indexing.IndexSettings(check, rebuild, checksum, allow_truncated, into)
    judged = indexing.run(paths, settings, workers, Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps([one.summary() for one in judged], indent=2))
    raise typer.Exit(1 if any(one.state == indexing.BAD for one in judged) else 0)


@app.command()
def inspect(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Folders, tar shards, or files and folders of other formats; addresses, too."
        ),
    ],
    limit: Annotated[int, typer.Option(min=0, help="How many samples to look into, spread evenly; 0: all.")] = 20_000,
    contact_sheet: Annotated[
        Path | None, typer.Option(help="Write a picture of samples with their classes here (.png).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=600, help="How many samples the contact sheet shows.")] = 24,
    order: Annotated[
        bool, typer.Option("--order", help="Say how well windows of shards mix samples, and what is read.")
    ] = False,
    window: Annotated[int, typer.Option(min=1, help="The window, in shards, for --order.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="The batch size for --order.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Say what folders or shards hold: samples, fields, classes, sizes, formats, and what is broken.

    Exit code 1 when a shard or a picture cannot be read.
    """
    wanted = inspecting.Wanted(limit, contact_sheet, samples, (window, batch_size) if order else None)
    told, healthy = inspecting.run(paths, wanted, Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    raise typer.Exit(0 if healthy else 1)
