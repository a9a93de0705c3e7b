"""`feedline report`: a page from run logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from feedline.cli.arguments import AsJson, print_json
from feedline.core.wrapping import printable, wrap
from feedline.errors import ArgumentError
from feedline.loader.report.page_html import RankReport, errors_of, page
from feedline.loader.report.raised import sentences
from feedline.loader.report.run_log import lines_of
from feedline.loader.report.runs import is_of_run_log, reports_of_logs
from feedline.loader.report.stats import count


def run(paths: Sequence[str], out: Path) -> tuple[list[RankReport], list[str]]:
    """Write the page of run logs, and return its reports and notes.

    There is one report for each run, rank and loader. Raises `ArgumentError` for a missing file, or one that is not a
    run log.
    """
    left_out: list[str] = []
    lines = (line for path in _expand(paths) for line in _lines(path, left_out))
    reports, notes = reports_of_logs(lines)
    notes += left_out
    out.write_text(page(reports, notes), encoding="utf-8")
    return reports, notes


def _expand(paths: Sequence[str]) -> list[Path]:
    """The files of paths and glob patterns, each once."""
    found = (name for path in paths for name in (sorted(glob(path)) or [path]))  # noqa: PTH207 - a whole path
    return [Path(name) for name in dict.fromkeys(found)]


def _lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    """The lines of a run log; a note counts all others."""
    remedy = "FEEDLINE_LOG=run.jsonl, or log= of the DataLoader, writes one"
    number = damaged = foreign = 0
    try:
        for line in lines_of(path):
            if is_of_run_log(line):
                number += 1
                yield cast("Mapping[str, Any]", line)
            elif line is None:
                damaged += 1
            else:
                foreign += 1
    except FileNotFoundError:
        raise ArgumentError(f"there is no run log {path}: {remedy}") from None
    if not number:
        raise ArgumentError(f"{path} is not a run log of feedline, or is empty: {remedy}")
    for amount, kind in ((damaged, "damaged or incomplete"), (foreign, "of another program")):
        if amount:
            notes.append(f"{path}: {count(amount, 'line')} left out as {kind}.")


def command(
    logs: Annotated[list[str], typer.Argument(metavar="LOG", help="Run logs of one run: a file for each rank.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write a report page from the logs of a run.

    A run writes such logs if `FEEDLINE_LOG=run.jsonl` is in its environment. The page compares the ranks, and names
    the slow one. Runs that share a log follow one another, newest first.
    """
    reports, notes = run(logs, out)
    if as_json:
        print_json([dict(each.figures) for each in reports])
    console = Console(stderr=as_json)
    runs = len({each.run for each in reports})
    written = f"{out}: " + (f"{runs} runs, " if runs > 1 else "") + count(len(reports), "loader")
    errors = errors_of([each for each in reports if each.run == 0])
    for text in (written, *(sentences(*error) for error in errors), *notes):
        lines = wrap(printable(text, console.encoding), console.width, break_long_words=False)
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
