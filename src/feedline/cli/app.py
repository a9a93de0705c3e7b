"""The commands and their options."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from feedline.cli import doctor as checks
from feedline.cli.demo import command
from feedline.cli.demo.comparison import Settings
from feedline.cpus import usable_cpus
from feedline.errors import FeedlineError

app = typer.Typer(
    help="Feeds PyTorch training loops: see it run, and see what this machine gives it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to standard output, and the rest to standard error.")
]


def main() -> None:
    """Run the command line; an error that feedline explains is printed without a traceback, exit code 2."""
    try:
        app()
    except (FeedlineError, OSError) as error:
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        Console(stderr=True).print(Text.assemble(("feedline: ", "bold red"), told))
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
def demo(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the pictures are kept; default: the cache.")
    ] = None,
    images: Annotated[int, typer.Option(min=200, max=100_000, help="How many pictures.")] = 6000,
    epochs: Annotated[int, typer.Option(min=1, help="How often each training sees them.")] = 1,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Worker processes; default: one per CPU, at most 4.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides network, order and crops.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a small network on real pictures, through torch's loader and through feedline's, and compare.

    Exit code 1 when the two trainings differ in a single loss, or the resumed epoch in a single bit.
    """
    chosen = Settings(epochs, min(4, usable_cpus()) if workers is None else workers, seed)
    outcome = command.run(directory or command.cache_directory(), images, chosen, Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(outcome.summary(), indent=2))
    raise typer.Exit(0 if outcome.equal else 1)


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
    raise typer.Exit(1 if any(finding.verdict is checks.Verdict.BAD for finding in findings) else 0)
