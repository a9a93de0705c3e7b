"""`feedline report`: a page from run logs."""

from __future__ import annotations

from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from feedline.cli.arguments import AsJson, print_json
from feedline.errors import ArgumentError
from feedline.loader.report.page_html import RankReport, page, reports_of_logs
from feedline.loader.report.run_log import read_log


def run(paths: Sequence[str], out: Path) -> list[RankReport]:
    """Write the page of run logs, and return its reports.

    There is one report for each rank and loader. Raises `ArgumentError` for a missing file, or one that is not a run
    log.
    """
    reports = list(reports_of_logs(_lines(path) for path in _expand(paths)))
    out.write_text(page(reports), encoding="utf-8")
    return reports


def _expand(paths: Sequence[str]) -> list[Path]:
    """The files of paths and glob patterns."""
    return [Path(name) for path in paths for name in (sorted(glob(path)) or [path])]  # noqa: PTH207 - a whole path


def _lines(path: Path) -> list[dict[str, object]]:
    try:
        lines = read_log(path)
    except FileNotFoundError:
        remedy = "FEEDLINE_LOG=run.jsonl, or log= of the DataLoader, writes one"
        raise ArgumentError(f"there is no run log {path}: {remedy}") from None
    if not lines or not {"rank", "loader", "wall_s", "time_s"} <= lines[-1].keys():
        raise ArgumentError(
            f"{path} is not a run log of feedline, or is empty: FEEDLINE_LOG=run.jsonl, or log= of the DataLoader, "
            "writes one"
        )
    return lines


def command(
    logs: Annotated[list[str], typer.Argument(metavar="LOG", help="Run logs of one run: a file for each rank.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write a report page from the logs of a run.

    A run writes such logs if `FEEDLINE_LOG=run.jsonl` is in its environment. The page compares the ranks, and names
    the slow one.
    """
    reports = run(logs, out)
    if as_json:
        print_json([dict(each.figures) for each in reports])
    else:
        Console(highlight=False).print(f"{out}: {len(reports)} {'loader' if len(reports) == 1 else 'loaders'}")
