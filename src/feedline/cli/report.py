"""`feedline report`: a page from run logs."""

from __future__ import annotations

from collections.abc import Sequence
from glob import glob
from pathlib import Path

from feedline.errors import ArgumentError
from feedline.loader.report.page_html import RankReport, page, reports_of_logs
from feedline.loader.report.run_log import read_log


def run(paths: Sequence[str], out: Path) -> list[RankReport]:
    """Write the page of these logs; returns the report of each rank.

    Raises `ArgumentError` for a file that is no run log.
    """
    reports = list(reports_of_logs(_lines(path) for path in _expanded(paths)))
    out.write_text(page(reports), encoding="utf-8")
    return reports


def _expanded(paths: Sequence[str]) -> list[Path]:
    """The files of paths and patterns; OSError for one that is missing."""
    return [Path(name) for path in paths for name in (sorted(glob(path)) or [path])]  # noqa: PTH207 - a whole path


def _lines(path: Path) -> list[dict[str, object]]:
    lines = read_log(path)
    if not lines or not {"rank", "loader", "wall_s", "time_s"} <= lines[-1].keys():
        raise ArgumentError(
            f"{path} is no run log of feedline, or an empty one: FEEDLINE_LOG=run.jsonl, or log= of the DataLoader, "
            "writes one"
        )
    return lines
