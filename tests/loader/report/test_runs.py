"""Runs in run logs: separate, complete where logs are not, and bounded."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Preloaded
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import feedline as fl
from feedline.cli.app import app
from feedline.cli.report import run
from feedline.loader.report.page_html import RankReport, page
from feedline.loader.report.run_log import RunLog, read_log
from feedline.loader.report.runs import MOST_LOADERS, MOST_POINTS, MOST_RUNS, is_of_run_log, reports_of_logs

DATA = TensorDataset(torch.arange(40))


@pytest.fixture
def line(tmp_path: Path) -> dict[str, Any]:
    """The last line of a run of one epoch."""
    path = tmp_path / "line.jsonl"
    list(fl.DataLoader(DATA, 4, log=path))
    return read_log(path)[-1]


def lines_from(line: Mapping[str, Any], start_s: float, number: int = 5, **figures: Any) -> Iterator[dict[str, Any]]:
    """Lines of a loader, one for each second and each ten batches."""
    known = {"instance": f"{start_s}", "pid": int(start_s), **figures}
    for place in range(number):
        sums = dict.fromkeys(("wait_s", "step_s"), place * 0.5)
        yield {**line, **known, **sums, "wall_s": float(place), "time_s": start_s + place, "batches": 10 * place}


SCRIPT = """
import torch

import feedline as fl

if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.arange(40))
    train, validation = (fl.DataLoader(data, size, log="run.jsonl") for size in (4, 8))
    for epoch in range(3):
        list(train), list(validation)
"""


def test_runs_that_share_a_log_are_separate(preloaded: Preloaded, tmp_path: Path) -> None:
    log, out = tmp_path / "run.jsonl", tmp_path / "report.html"
    for _ in range(2):
        code, printed = preloaded.run_code(SCRIPT, tmp_path)
        assert code == 0, printed
    reports, notes = run([str(log)], out)
    assert notes == []
    assert [(each.run, each.loader, each.figures["batches"]) for each in reports] == [
        (0, "TensorDataset", 30),
        (0, "TensorDataset-2", 15),
        (1, "TensorDataset", 30),
        (1, "TensorDataset-2", 15),
    ]
    assert reports[0].figures["time_s"] > reports[2].figures["time_s"]
    for each in reports:
        batches = [point["batches"] for point in each.history]
        assert batches == sorted(batches)
    assert out.read_text().count("<summary>Run from ") == 2


def test_ranks_and_loaders_of_several_runs(line: dict[str, Any]) -> None:
    lines = [
        each
        for start_s in (1000, 2000, 3000)
        for rank in range(2)
        for name in ("Train", "Validation")
        for each in lines_from(line, start_s + rank, rank=rank, world_size=2, loader=name, instance=f"{start_s}{name}")
    ]
    reports, notes = reports_of_logs(lines)
    assert notes == []
    assert [(each.run, each.loader, each.figures["rank"]) for each in reports] == [
        (number, name, rank) for number in range(3) for name in ("Train", "Validation") for rank in range(2)
    ]
    assert [each.start_s for each in reports[::4]] == [3000, 2000, 1000]
    html = page(reports)
    assert html.count("<h2>Ranks of Train</h2>") == 3
    assert html.count("<details open>") == 4  # the newest run, and in each run the loader that waits longest


def test_loaders_that_are_made_again_have_their_own_start(line: dict[str, Any]) -> None:
    lines = [each for fold in range(20) for each in lines_from(line, 1000.0 + 10 * fold, pid=7)]
    reports, notes = reports_of_logs(lines)
    assert [each.loader for each in reports] == [f"TensorDataset, no. {number}" for number in range(13, 21)]
    assert len(reports) == MOST_LOADERS
    assert notes == ["Rank 0 made 20 loaders named TensorDataset: the last 8 are shown."]
    assert "TensorDataset, no. 20 · from 1970-01-01 00:19:50 UTC · waits" in page(reports)


def test_loaders_of_logs_without_instances_are_separate(line: dict[str, Any]) -> None:
    lines = [each for start_s in (1000.0, 2000.0) for each in lines_from(line, start_s, pid=7)]
    for each in lines:
        del each["instance"]
    reports, _ = reports_of_logs(lines)
    assert [each.start_s for each in reports] == [1000, 2000]
    assert [len(each.history) for each in reports] == [5, 5]


def test_a_rank_that_ended_early_or_has_no_log_is_named(line: dict[str, Any]) -> None:
    numbers = {0: 9, 1: 3, 3: 9}
    lines = [
        each
        for rank, number in numbers.items()
        for each in lines_from(line, 1000.0 + rank, number, rank=rank, world_size=4)
    ]
    reports, notes = reports_of_logs(lines)
    assert len(reports) == 3
    missing, early = notes
    assert missing == "There is no log of rank 2."
    assert early == (
        "Rank 1 ended early, or its log is not complete: 20 batches of TensorDataset until 1970-01-01 00:16:43 UTC, "
        "where other ranks have 80."
    )
    html = page(reports, ["<b>&"])
    assert "<li>&lt;b&gt;&amp;</li>" in html
    assert "Ranks" in html


def test_clocks_that_differ_are_named(line: dict[str, Any]) -> None:
    lines = [each for rank in range(2) for each in lines_from(line, 1000.0 + 7200 * rank, rank=rank, world_size=2)]
    reports, notes = reports_of_logs(lines)
    assert [each.run for each in reports] == [0, 0]
    assert notes == [
        "The log of rank 1 begins 7,200 s after that of rank 0: their clocks differ, or they are of different runs."
    ]


def test_containers_that_restart_with_equal_names_are_separate_runs(line: dict[str, Any]) -> None:
    lines = [
        each
        for start_s in (1000.0, 2000.0)
        for rank in range(2)
        for each in lines_from(
            line, start_s + rank, host=f"worker-{rank}", pid=1, process=f"{start_s}-{rank}", rank=rank, world_size=2
        )
    ]
    reports, notes = reports_of_logs(lines)
    assert notes == []
    assert [(each.run, each.figures["rank"], each.start_s) for each in reports] == [
        (0, 0, 2000.0),
        (0, 1, 2001.0),
        (1, 0, 1000.0),
        (1, 1, 1001.0),
    ]


@pytest.mark.parametrize(
    ("ahead_s", "notes"), [(0.5, []), (30.0, ["The clock of rank 1 is 30 s ahead of that of rank 0."])]
)
def test_clocks_are_compared_by_the_moment_at_which_all_ranks_began_an_epoch(
    ahead_s: float, notes: list[str], line: dict[str, Any]
) -> None:
    """The second rank writes its first line 40 s later."""
    met = [["0/0", 990.0], ["0/1", 1002.0]]
    lines = [
        {**each, "met": [name, met_s + ahead_s * rank]}
        for rank in range(2)
        for name, met_s in met
        for each in lines_from(
            line, met_s + (40 + ahead_s) * rank, rank=rank, world_size=2, instance=f"{rank}", pid=rank
        )
    ]
    assert reports_of_logs(lines)[1] == notes


def test_a_clock_that_is_set_back_does_not_turn_the_charts(line: dict[str, Any]) -> None:
    lines = list(lines_from(line, 10_000.0, 9))
    for each in lines[5:]:
        each["time_s"] -= 3600
    (report,), (note,) = reports_of_logs(lines)
    assert "The clock of rank 0 was set back" in note
    html = page([report])
    points = html.partition('<polyline points="')[2].partition('"')[0].split()
    places = [float(point.partition(",")[0]) for point in points]
    assert places == sorted(places)
    assert places[-1] == 640


def test_lines_of_an_earlier_version_suffice(line: dict[str, Any]) -> None:
    least = [
        {name: each[name] for name in ("rank", "loader", "wall_s", "time_s", "batches")}
        for each in lines_from(line, 1000.0)
    ]
    stages = {"fetch": {"count": 3, "total_s": 1.5}}
    (report,), _ = reports_of_logs([*least, {**least[-1], "stages": stages, "loop": {"wait": stages["fetch"]}}])
    html = page([report])
    assert "<td>fetch</td><td>3</td>" in html
    assert all(map(is_of_run_log, least))
    assert not any(is_of_run_log({**least[0], name: None}) for name in ("rank", "loader", "wall_s", "time_s"))


def test_many_lines_and_runs_stay_small(line: dict[str, Any]) -> None:
    tracemalloc.start()
    try:
        (report,), _ = reports_of_logs(lines_from(line, 1000.0, 20_000))
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert MOST_POINTS / 2 < len(report.history) <= MOST_POINTS + 1
    assert report.history[-1]["batches"] == report.figures["batches"] == 199_990
    assert len(page([report])) < 200_000
    reports, notes = reports_of_logs(each for start in range(30) for each in lines_from(line, 100.0 * start, 2))
    assert {each.run for each in reports} == set(range(MOST_RUNS))
    assert notes == ["10 earlier runs in these logs: not shown."]


def test_lines_of_others_and_damaged_lines_are_counted(line: dict[str, Any], tmp_path: Path) -> None:
    path, out = tmp_path / "run.jsonl", tmp_path / "page.html"
    texts = [json.dumps(each) for each in lines_from(line, 1000.0)]
    deep = "[" * (sys.getrecursionlimit() * 100)
    path.write_text(
        "\n".join([*texts[:3], '{"epoch": 1}', deep, texts[3], '{"level": "info"}', texts[4], texts[0][:99]])
    )
    result = CliRunner().invoke(app, ["report", str(path), str(path), "--out", str(out)], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.exception
    assert result.stdout.splitlines() == [
        f"{out}: 1 loader",
        f"{path}: 2 lines left out as damaged or incomplete.",
        f"{path}: 2 lines left out as of another program.",
    ]
    assert "left out as damaged" in out.read_text()


def test_a_run_that_follows_a_killed_one_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"number": 1, "bat')
    RunLog(path).write({"number": 2})
    assert read_log(path) == [{"number": 2, "event": "interval"}]


def test_many_short_loaders_stay_within_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for number in range(200):
        log = RunLog(path, max_nbytes=10_000)
        figures = {"time_s": number, "rank": 0, "loader": "A", "instance": f"{number}", "filler": "x" * 100}
        log.write(figures, "epoch")
        assert path.stat().st_size <= 10_000 + 200
    lines = read_log(path)
    assert [each["instance"] for each in lines] == [str(number) for number in range(200 - len(lines), 200)]


def test_thinning_keeps_the_last_line_of_each_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for name in ("first", "second"):
        log = RunLog(path, interval_s=0, max_nbytes=10_000)
        for number in range(100):
            time_s = number + 100 * (name == "second")
            log.write({"time_s": time_s, "rank": 0, "loader": "A", "instance": name, "number": number, "f": "x" * 100})
    lines = read_log(path)
    assert [each["number"] for each in lines if each["instance"] == "first"][-1] == 99


def test_batches_that_are_ready_are_shown_only_during_epochs(line: dict[str, Any]) -> None:
    lines = [{**each, "event": "interval", "ready": 4} for each in lines_from(line, 1000.0, 9)]
    for each in lines[4:]:
        each.update(event="epoch", ready=0)
    (report,), _ = reports_of_logs(lines)
    assert "ready batches: 4 now" in page([report])
    (report,), _ = reports_of_logs([{**each, "event": "epoch"} for each in lines])
    assert "ready batches" not in page([report])


def test_figures_of_a_page_are_in_the_order_of_its_forms(line: dict[str, Any]) -> None:
    reports = [RankReport({**line, "rank": rank, "loader": name}) for rank in range(2) for name in ("B", "A")]
    text = page(reports).partition('id="figures">')[2].partition("</script>")[0]
    assert [(each["loader"], each["rank"]) for each in json.loads(text)] == [("B", 0), ("B", 1), ("A", 0), ("A", 1)]
