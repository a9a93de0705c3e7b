"""The `feedline` command: its subcommands, help and errors."""

from __future__ import annotations

import faulthandler
import io
import shutil
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from feedline.cli import attempt, audit, index, replay, report
from feedline.cli.bench import command as bench
from feedline.cli.doctor import command as doctor
from feedline.cli.inspect import command as inspect
from feedline.cli.lint import command as lint
from feedline.cli.pack import command as pack
from feedline.cli.top import command as top
from feedline.core.wrapping import printable, wrap
from feedline.errors import FeedlineError

_LEAST_COLUMNS = 60
"""Columns of the narrowest terminal that shows help in panels."""


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
        """First sentence of the help, without abbreviation."""
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
    rich_markup_mode="markdown",  # reflows paragraphs, and prints square brackets as they are
)


def main() -> None:
    """Run the command line.

    Errors of feedline and of the operating system are printed without a traceback. The exit code is then 2.
    """
    try:
        with patch.object(warnings, "formatwarning", _format_warning):
            app()
    except (FeedlineError, OSError) as error:
        _print_error("\n".join([str(error), *getattr(error, "__notes__", ())]), Console(stderr=True))
        sys.exit(2)


_OWN = str(Path(__file__).parents[1])


_format_foreign = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Text of a warning, without the place if that is feedline's own."""
    if filename.startswith(_OWN):
        return f"feedline: {message}\n"
    return _format_foreign(message, category, filename, lineno, line)


def _print_error(message: str, console: Console) -> None:
    """Print an error at the width of a terminal; in files, whole."""
    lines = printable(f"feedline: {message}", console.encoding).splitlines()
    if console.is_terminal:
        lines = [part for line in lines for part in wrap(line, console.width, break_long_words=False) or [""]]
    text = Text("\n".join(lines))
    text.stylize("bold red", 0, len("feedline:"))
    console.print(text, soft_wrap=True)


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
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a library that crashes on a sample would end the command without a word
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may hold bytes that are not UTF-8
            stream.reconfigure(errors="backslashreplace")


_COMMANDS = {
    "doctor": doctor, "lint": lint, "bench": bench, "try": attempt, "top": top, "report": report, "audit": audit,
    "replay": replay, "pack": pack, "index": index, "inspect": inspect,
}  # fmt: skip
"""The module of each subcommand, in the order of the help."""


for _name, _module in _COMMANDS.items():
    app.command(_name, cls=_Command)(_module.command)
