"""The commands of `feedline` and their options."""

from __future__ import annotations

import enum
import io
import json
import shutil
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from feedline.cli import attempt as attempting
from feedline.cli import index as indexing
from feedline.cli import report as reporting
from feedline.cli.bench import command as benching
from feedline.cli.bench.show import summary as bench_summary
from feedline.cli.bench.sweep import Sweep, Threshold, default_workers, settings_of
from feedline.cli.doctor import command as examining
from feedline.cli.inspect import command as inspecting
from feedline.cli.inspect.order import Ranks
from feedline.cli.lint import command as linting
from feedline.cli.pack import PackOptions, ShardSize
from feedline.cli.pack import command as packing
from feedline.cli.top import command as watching
from feedline.errors import FeedlineError
from feedline.loader.resources import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST_COLUMNS = 60
"""Width of a terminal from which help is shown in panels."""


class _NarrowFormatter(typer.Context.formatter_class):  # type: ignore[misc,valid-type] # no other public name
    """Plain help text with long option names on lines of their own."""

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write two columns, the first at most a third of the width."""
        super().write_dl(rows, min(col_max, self.width // 3), col_spacing)


class _Command(TyperCommand):
    """A command whose help also fits a terminal of 40 columns."""

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        """Return plain help for a narrow terminal, or else print panels."""
        return _narrow_help(self, ctx) or super().get_help(ctx)

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence of the help, unabbreviated."""
        return super().get_short_help_str(max(limit, 1000))


class _Group(TyperGroup):
    """The list of commands; its help fits a narrow terminal, too."""

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        """Return plain help for a narrow terminal, or else print panels."""
        return _narrow_help(self, ctx) or super().get_help(ctx)


def _narrow_help(command: _Command | _Group, ctx: typer.Context) -> str:
    """Plain help for the width of the terminal; empty where panels fit."""
    columns = shutil.get_terminal_size().columns
    if columns >= _LEAST_COLUMNS:
        return ""
    # Panels abbreviate option names when space is short, and the usual formatter is at least 50 columns wide.
    command.rich_markup_mode = None
    formatter = _NarrowFormatter(width=columns - 1)
    command.format_help(ctx, formatter)
    return str(formatter.getvalue()).rstrip("\n")


app = typer.Typer(
    cls=_Group,
    help="Pack, index and inspect training data; check the machine, loaders and code.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


Workers = Annotated[int | None, typer.Option(min=1, help="Number of threads. Default: one per CPU.")]


AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object to standard output, and everything else to standard error."),
]


class OnError(enum.StrEnum):
    """Actions of `feedline pack` for a sample that cannot be read."""

    RAISE = "raise"
    SKIP = "skip"


def main() -> None:
    """Run the command line.

    An error with an explanation of feedline's or of the operating system is printed without a traceback; exit code 2.
    """
    try:
        app()
    except (FeedlineError, OSError) as error:
        message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        Console(stderr=True).print(Text.assemble(("feedline: ", "bold red"), message), soft_wrap=True)
        sys.exit(2)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"feedline {installed_version('feedline')}")
        raise typer.Exit


@app.callback()
def feedline(
    version: Annotated[  # noqa: ARG001 - acts by its callback
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of all commands."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may hold bytes that are not UTF-8
            stream.reconfigure(errors="backslashreplace")


@app.command(cls=_Command)
def doctor(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[LOADER]", help="A loader to check, too: train.py:loader or package.module:loader."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Training processes that will share the data.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Check this machine, and a loader if one is named.

    Findings have evidence and a remedy.

    The script of a loader is executed without its `if __name__ == "__main__"` block, and up to 200 samples are read.

    Exit code 1 if something stops or slows a run.
    """
    examination = examining.run(target, ranks=ranks)
    if as_json:
        typer.echo(json.dumps(examination.summary(), indent=2))
    else:
        examining.show(examination, Console(highlight=False))
    raise typer.Exit(0 if examination.is_healthy else 1)


@app.command(cls=_Command)
def lint(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Python files, notebooks, or folders of them.")],
    as_json: AsJson = False,
) -> None:
    """Find mistakes in code that loads data.

    Also lists what feedline would simplify.

    Nothing is executed. `# feedline: ignore[code]` on a line switches a rule off.

    Exit code 1 if there is something to mend.
    """
    survey = linting.run(paths)
    if as_json:
        typer.echo(json.dumps(survey.summary(), indent=2))
    else:
        linting.show(survey, Console(highlight=False))
    raise typer.Exit(0 if survey.is_clean else 1)


@app.command(cls=_Command)
def bench(
    target: Annotated[str, typer.Argument(metavar="LOADER", help="train.py:loader or package.module:loader.")],
    workers: Annotated[
        str | None, typer.Option(help="Worker counts, such as 0,2,4. Default: up to twice the CPUs.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="worker_method to try; repeat it for more.")] = None,
    prefetch: Annotated[str, typer.Option(help="Values of prefetch_factor, such as 2,4.")] = "",
    batch_size: Annotated[str, typer.Option(help="Batch sizes, such as 32,64.")] = "",
    step: Annotated[str, typer.Option(help="Length of a training step, such as 20ms; it sleeps.")] = "0",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds through all settings.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.05, help="Seconds per round and setting.")] = 2.0,
    fail_if: Annotated[
        list[str] | None, typer.Option(help="Exit with 1 if this holds for the loader as it is: 'wait_share > 5%'.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a chart into this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all figures into this JSON file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a loader under many settings, and recommend one.

    torch's own loader is measured, too.

    The script of the loader is executed without its `if __name__ == "__main__"` block. Settings are measured in turn,
    round by round, so that other load hits all of them.
    """
    counts = default_workers() if workers is None else benching.parse_numbers(workers)
    sizes = benching.parse_numbers(prefetch), benching.parse_numbers(batch_size)
    thresholds = [Threshold.parse(text) for text in fail_if or ()]
    sweep = Sweep(settings_of(counts, method or (), *sizes), rounds, seconds, benching.parse_step(step))
    outcome = benching.run(target, sweep, thresholds, Console(stderr=True))
    benching.save(outcome, sweep, svg, out)
    if as_json:
        typer.echo(json.dumps(bench_summary(outcome.trials, outcome.chosen, sweep.step_s, outcome.failed), indent=2))
    else:
        benching.print_outcome(outcome, sweep, Console())
    raise typer.Exit(1 if outcome.failed or outcome.chosen is None else 0)


@app.command("try", cls=_Command)
def attempt(
    target: Annotated[str, typer.Argument(metavar="LOADER", help="train.py:loader or package.module:loader.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="An argument to change, such as num_workers=10; repeat it for more."),
    ] = None,
    step: Annotated[str, typer.Option(help="Length of a training step, such as 20ms; it sleeps.")] = "0",
    seconds: Annotated[float, typer.Option(min=0.3, help="Seconds of measurement.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Measure what changed arguments gain, next to the prediction.

    Without --set, the first advice of the loader's verdict is tried.

    The script of the loader is executed without its `if __name__ == "__main__"` block. Copies of the loader read its
    data in turn, as it is and changed; nothing is delivered.

    Exit code 1 if there is nothing to try.
    """
    arguments = attempting.parse_arguments(changes or ())
    result = attempting.run(target, arguments, seconds, benching.parse_step(step), Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(result.summary(), indent=2))
    else:
        attempting.show(result, Console())
    raise typer.Exit(0 if result.arguments else 1)


@app.command(cls=_Command)
def top(
    pid: Annotated[int | None, typer.Argument(metavar="[PID]", help="A training process. Default: all.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two screens.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen and end, as where there is no terminal.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Watch the loaders of training processes.

    Nothing is locked, and no signal is sent: a loop that hangs can be looked at, with the sample of each worker.

    Exit code 1 if no loader is found.
    """
    console = Console(highlight=False)
    if not (once or as_json) and console.is_terminal:
        try:
            watching.follow(pid, console, interval)
        except KeyboardInterrupt:
            raise typer.Exit from None
    readings = watching.report(pid)
    if as_json:
        typer.echo(json.dumps(watching.summary(readings), indent=2))
    else:
        watching.show(readings, console)
    raise typer.Exit(0 if readings else 1)


@app.command(cls=_Command)
def report(
    logs: Annotated[list[str], typer.Argument(metavar="LOG...", help="Run logs of one run: a file for each rank.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write a report page from the logs of a run.

    `FEEDLINE_LOG=run.jsonl` writes such logs. Several ranks are compared, and the slow one is named.
    """
    reports = reporting.run(logs, out)
    if as_json:
        typer.echo(json.dumps([dict(each.figures) for each in reports], indent=2))
    else:
        Console(highlight=False).print(f"{out}: {len(reports)} {'loader' if len(reports) == 1 else 'loaders'}")


@app.command(cls=_Command)
def pack(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE... DEST", help="Folders or tar shards, then the folder for the new shards."),
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
        typer.Option(help="Image field to change, if samples have several. Repeat it for more fields."),
    ] = None,
    shuffle: Annotated[
        bool | None, typer.Option("--shuffle/--no-shuffle", help="Default: shuffle class folders only.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the shuffled order.")] = 0,
    on_error: Annotated[
        OnError,
        typer.Option(help="If a sample cannot be read: stop, or leave it out and list it."),
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
    result = packing.run(paths, options, workers or usable_cpus(), Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(packing.summary(result), indent=2))


@app.command(cls=_Command)
def index(
    paths: Annotated[
        list[str], typer.Argument(metavar="SHARDS...", help="Tar shards or folders of them, as paths or URLs.")
    ],
    into: Annotated[
        Path | None,
        typer.Option(
            help="Write indexes into this folder: the index of s3://bucket/a/0.tar as bucket/a/0.tar.index. Upload it "
            "next to the object, or pass the folder to TarShards as index_dir=."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare shards with their indexes, and write nothing.")
    ] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Rebuild all indexes, even valid ones.")] = False,
    checksum: Annotated[bool, typer.Option("--checksum", help="Store a checksum of the shard in its index.")] = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Index the complete samples of a truncated shard.")
    ] = False,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Build the index of each tar shard that has no valid one.

    Shards in object stores (s3://, gs://, az://, https://, ...) are read once, with credentials from the environment.
    Their indexes go to --into FOLDER, or else to the user's cache folder, where datasets find them.

    Exit code 1 if a shard cannot be indexed, or if its index is not valid.
    """
    settings = indexing.IndexSettings(check, rebuild, checksum, allow_truncated, into)
    results = indexing.run(paths, settings, workers, Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps([result.summary() for result in results], indent=2))
    raise typer.Exit(1 if any(result.state == indexing.BAD for result in results) else 0)


@app.command(cls=_Command)
def inspect(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Folders, tar shards, or files and folders of other formats, as paths or URLs."
        ),
    ],
    limit: Annotated[int, typer.Option(min=0, help="Number of samples to examine, evenly spaced. 0: all.")] = 20_000,
    contact_sheet: Annotated[
        Path | None, typer.Option(help="Draw samples with their classes into this image file (.png).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=600, help="Number of samples on the contact sheet.")] = 24,
    order: Annotated[
        bool, typer.Option("--order", help="Show how well windows of shards mix samples, and what they read.")
    ] = False,
    window: Annotated[int, typer.Option(min=1, help="Window for --order, in shards.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size for --order.")] = 256,
    world: Annotated[int, typer.Option(min=1, help="Ranks that share the shards, for --order.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Machines on which these ranks run.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Summarize folders or shards: samples, fields, classes, sizes, formats, errors.

    Exit code 1 if a shard or an image cannot be read.
    """
    ranks = Ranks(world, nodes) if world > 1 else None
    options = inspecting.InspectOptions(limit, contact_sheet, samples, (window, batch_size) if order else None, ranks)
    summary, healthy = inspecting.run(paths, options, Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    raise typer.Exit(0 if healthy else 1)
