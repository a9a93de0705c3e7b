"""`feedline top`: its screen for loops that run, hang and end, at 80 columns and at 40."""

from __future__ import annotations

import io
import json
import os
import re
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gated import hanging_loop
from rich.console import Console
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import feedline as fl
from feedline.cli.app import app
from feedline.cli.top import command
from feedline.cli.top.command import report
from feedline.cli.top.keys import ScreenState, keyboard
from feedline.cli.top.reading import LoaderReading, WorkerReading, read_all
from feedline.cli.top.screen import screen, sparkline
from feedline.core.page import find_pages


def has_page_of_five(loader: fl.DataLoader[Any]) -> bool:
    return loader.stats().batches == 5 and bool(find_pages(os.getpid()))


def text_of(now: LoaderReading, width: int, before: LoaderReading | None = None) -> list[str]:
    return [line.plain for line in screen(before, now, width)]


FIGURES: dict[str, Any] = {
    "script": "train.py", "loader": "Photos", "rank": 3, "world_size": 8, "time_s": 0.0, "epoch": 3, "position": 12_288,
    "length": 48_000, "batches": 156_288, "samples": 5_000_000, "wait_s": 3.0, "step_s": 97.0, "ready": 12, "ahead": 16,
    "skipped": 2, "restarts": 1, "throttled_share": 0.31, "stores": {"nbytes": 38 << 20, "requests": 212, "retries": 1,
    "cache_hits": 93, "cache_misses": 7}, "since_epoch": {"batches": 12_288, "wall_s": 245.0}, "history": [],
    "loop": {"wait": {"total_s": 3.0, "count": 5000}, "step": {"total_s": 97.0, "count": 5000}},
    "verdict": {"headline": "The loop waited for data 3.0 % of the time: it is not bound by its data.",
                "advice": [{"text": "num_workers=2 would keep up as well, and leave CPUs to others.", "gain": None}]},
}  # fmt: skip
WORKERS = (
    WorkerReading(0, 11, "R", 1.0, 1 << 30, 0.02, 12_290, 8_812),
    WorkerReading(1, 12, "D", 1.0, 1 << 30, 11.0, 12_289, 9_014),
    WorkerReading(2, 13, "S", 1.0, 1 << 30, None, 0, None),
)
NOW = LoaderReading(4711, 10**13, 10**13 - 10**7, 156_288, FIGURES, WORKERS)


def test_a_loop_at_80_columns() -> None:
    before = replace(NOW, now_ns=NOW.now_ns - 10**9, workers=(replace(WORKERS[0], cpu_s=0.1), *WORKERS[1:]))
    lines = text_of(NOW, 80, before)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("train.py 4711 · Photos · rank 3 · epoch 3 · 12,288 of 48,000 · 12 min left")
    assert lines[1].startswith("loop   waits 3.0 %  50,000 samples/s  step 19 ms  wait 600 µs")
    assert lines[2] == "ready  ████████░░  12 of 16 batches"
    assert lines[3] == "    0  █████████░  90 %   1.0 GiB  20 ms at batch 12,290, sample 8,812"
    assert lines[4].endswith("11 s at batch 12,289, sample 9,014, disk")
    assert lines[5].endswith("idle")
    assert lines[6] == "stores 38 MiB · 212 requests · 1 retry · cache 93 %"
    assert lines[7] == "2 samples skipped · 1 worker restarted · CPU quota used up in 31 % of the time"


def test_a_page_of_the_epoch_before_shows_the_present_one() -> None:
    later = replace(NOW, batches=NOW.batches + 48_000)
    assert "epoch 4 · 12,288 of 48,000 · 12 min left" in text_of(later, 80)[0]
    ended = replace(NOW, batches=NOW.batches + 48_000 - 12_288)
    assert "epoch 3 · 48,000 of 48,000" in text_of(ended, 80)[0]


def test_a_loop_at_40_columns() -> None:
    lines = text_of(NOW, 40)
    assert max(map(len, lines)) <= 40
    assert lines[:11] == [
        "train.py 4711 · Photos · rank 3",
        "epoch 3 · 12,288 of 48,000 · 12 min left",
        "loop   waits 3.0 %  50,000 samples/s",
        "ready  12 of 16 batches",
        "worker 1   11 s     sample 9,014  disk",
        "worker 0   20 ms    sample 8,812",
        "worker 2   idle",
        "stores 38 MiB · 212 requests · 1 retry",
        "cache 93 %",
        "2 samples skipped · 1 worker restarted",
        "CPU quota used up in 31 % of the time",
    ]


def test_the_parts_of_building_a_batch_have_a_line() -> None:
    totals = {"fetch": 90.0, "collate": 10.0, "read s3://photos": 31.0, "decode": 62.0, "transform": 2.0}
    figures = {
        **FIGURES, "stages": {stage: {"total_s": total_s} for stage, total_s in totals.items()},
        "read_nbytes_per_sample": 110 << 10, "delivered_nbytes_per_sample": 147 << 10,
    }  # fmt: skip
    now = replace(NOW, figures=figures)
    wide = "build  decode 62 %  read s3://photos 31 %  110 KiB read a sample"
    assert wide in text_of(now, 80)
    assert f"{wide}  147 KiB delivered a sample" in text_of(now, 100)
    assert "build  decode 62 %" in text_of(now, 40)
    assert not any(line.startswith("build") for line in text_of(NOW, 80))


def test_a_wait_of_an_hour_is_the_first_thing_to_see() -> None:
    waiting = replace(NOW, phase_start_ns=-(NOW.now_ns - 3600 * 10**9), batches=156_290)
    assert text_of(waiting, 80)[1] == "loop   has waited 60 min  for batch 12,290"


def test_many_workers_do_not_fill_the_screen() -> None:
    crowd = replace(NOW, workers=tuple(replace(WORKERS[0], worker=number, pid=number) for number in range(64)))
    assert sum("at batch" in line for line in text_of(crowd, 80)) == 16
    assert any("and 48 more workers" in line for line in text_of(crowd, 80))


@pytest.mark.parametrize(("width", "height"), [(40, 20), (40, 60), (80, 24), (200, 50)])
def test_as_many_workers_as_fit_are_shown_and_the_slowest_is(width: int, height: int) -> None:
    crowd = tuple(replace(WORKERS[0], worker=number, busy_s=number / 10) for number in range(64))
    lines = [line.plain for line in screen(None, replace(NOW, workers=crowd), width, height=height)]
    assert len(lines) == height
    workers = [
        number for line in lines if len(numbers := re.findall(r"^(?:worker)? +(\d+)  ", line)) for number in numbers
    ]
    assert workers == [str(63 - number) for number in range(len(workers))]
    assert f"       and {64 - len(workers)} more workers" in lines
    assert any("not bound by its" in line for line in lines)
    low = [line.plain for line in screen(None, replace(NOW, workers=crowd), width, height=8)]
    assert any(re.match(r"(worker)? +63  ", line) for line in low)


def test_all_workers_of_a_high_screen_are_in_order() -> None:
    crowd = tuple(replace(WORKERS[0], worker=number, busy_s=number / 10) for number in range(20))
    lines = [line.plain for line in screen(None, replace(NOW, workers=crowd), 80, height=40)]
    assert [int(line[:5]) for line in lines if "at batch" in line] == list(range(20))


def test_the_clock_goes_on_while_the_loop_hangs() -> None:
    moments = [replace(NOW, figures={**FIGURES, "rank": 0, "world_size": 1}, time_s=now_s) for now_s in (60.0, 3660.0)]
    first, second = (text_of(moment, 90)[0][-8:] for moment in moments)
    assert first[-5:] == second[-5:] == "01:00"
    assert first != second


def test_an_epoch_that_has_not_begun_is_waited_for() -> None:
    ended = replace(NOW, batches=NOW.batches + 48_000 - 12_288, phase_start_ns=-(NOW.now_ns - 2 * 10**9))
    assert text_of(ended, 80)[1] == "loop   has waited 2.0 s  for the next epoch"


@pytest.mark.parametrize("width", [40, 80])
def test_screens_of_several_loaders_fit_a_terminal_of_any_encoding(width: int) -> None:
    crowd = tuple(replace(WORKERS[0], worker=number, batch=10**6, index=10**9) for number in range(16))
    pairs = [(None, replace(NOW, pid=pid, workers=crowd)) for pid in range(9)]
    for height in (8, 24, 60):
        output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        console = Console(file=output, width=width, height=height, force_terminal=False)
        console.print(command._screens(pairs, console, height, ScreenState(has_keyboard=True)))
        output.seek(0)
        lines = output.read().splitlines()
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert sum("epoch 3" in line for line in lines) >= min(height // 8, 9)
        assert any(" more: feedline top PID" in line for line in lines) == (height < 60)


def test_sparklines() -> None:
    assert sparkline([0, 0.5, 1]) == "▁▅█"


@pytest.fixture(autouse=True)
def without_loaders_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what other tests of this process have not closed yet."""
    known = {reading.key for reading in read_all(os.getpid())}
    ours = lambda pid: [reading for reading in read_all(pid) if reading.key not in known]  # noqa: E731
    monkeypatch.setattr(command, "read_all", ours)


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2, "worker_method": "process"}])
def test_a_hanging_loop_is_shown_with_its_sample(arguments: dict[str, Any], tmp_path: Path) -> None:
    with hanging_loop(tmp_path / "gate", has_page_of_five, **arguments):
        ((_, now),) = report(os.getpid())
        assert now.phase_start_ns < 0
        assert now.batches == 5
        if arguments:
            assert (5, 20) in [(worker.batch, worker.index) for worker in now.workers]
            assert {worker.pid for worker in now.workers} & {os.getpid()} == set()
        result = CliRunner().invoke(app, ["top", str(os.getpid()), "--json"])
        assert result.exit_code == 0
        (loader,) = json.loads(result.stdout)
        assert loader["waiting_s"] > 0
        plain = CliRunner().invoke(app, ["top", str(os.getpid())], env={"COLUMNS": "40"})
        assert plain.stdout.splitlines()[0].endswith(" · Gated")
    assert report(os.getpid()) == []


def test_where_nothing_runs_it_says_so() -> None:
    result = CliRunner().invoke(app, ["top", "1", "--once"])
    assert result.exit_code == 1
    assert "There is no running feedline loop" in result.stdout


def test_a_loader_that_has_ended_is_at_rest() -> None:
    loader = fl.DataLoader(TensorDataset(torch.arange(8)), 4)
    list(loader)
    ((_, now),) = report(os.getpid())
    assert "at rest" in text_of(now, 80)[1]
    loader.close()


@pytest.mark.parametrize("width", [40, 80])
def test_figures_that_are_not_known_yet_are_left_out(width: int) -> None:
    loop = {"wait": {"total_s": 0.0, "count": 0}, "step": {"total_s": 0.0, "count": 0}}
    first = {
        **FIGURES,
        "ahead": 0,
        "position": 0,
        "batches": 0,
        "samples": 0,
        "wait_s": 0.0,
        "step_s": 0.0,
        "loop": loop,
    }
    begun = replace(NOW, figures={**first, "since_epoch": {"batches": 0, "wall_s": 0.0}}, batches=3, workers=())
    assert "loop   has begun" in text_of(begun, width)
    assert "loop   at rest" in text_of(replace(begun, phase_start_ns=0), width)
    assert not any("…" in line for line in text_of(begun, width))


def test_a_slow_loop_has_a_rate() -> None:
    slow = replace(NOW, figures={**FIGURES, "samples": 40})
    assert "0.4 samples/s" in text_of(slow, 80)[1]
    assert " left" not in text_of(replace(NOW, phase_start_ns=0), 80)[0]


def test_keys_change_the_view_only() -> None:
    view = ScreenState(has_keyboard=True)
    assert view.after("s").order == "busy"
    assert view.after("p").is_paused
    assert not view.after("p").after(" ").is_paused
    assert view.after("a").has_all_advice
    assert view.after("x") == view
    assert view.after("s").after("s").order == "CPU"
    assert view.after("s").after("s").after("s").after("s") == view
    assert view.help(80).startswith("[q]uit")
    assert all(len(view.after("p").after("a").help(width)) <= width for width in (30, 40, 80))


def test_workers_are_sorted_and_all_advice_is_shown() -> None:
    advice = [{"text": f"num_workers={number}"} for number in range(5)]
    now = replace(
        NOW,
        figures={**FIGURES, "verdict": {"headline": "It waits.", "advice": advice}},
        workers=tuple(
            WorkerReading(number, 90 + number, "R", cpu, nbytes, busy, 5, 1)
            for number, cpu, nbytes, busy in ((0, 1.0, 300, 0.5), (1, 3.0, 100, 2.0), (2, 2.0, 200, None))
        ),
    )
    for order, wanted in (("number", "012"), ("busy", "102"), ("CPU", "120"), ("memory", "021")):
        lines = [line.plain for line in screen(None, now, 80, ScreenState(order=order))]  # type: ignore[arg-type]
        assert [line.strip()[0] for line in lines if line[:5].strip() in set("012")] == list(wanted)
    few, every = (len(screen(None, now, 80, ScreenState(has_all_advice=each))) for each in (False, True))
    assert every > few


def test_keys_are_read_one_by_one_and_the_terminal_is_restored() -> None:
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    try:
        with keyboard(theirs) as keys:
            assert keys.is_available
            assert keys.wait(0) == ""
            os.write(ours, b"s")  # without a new line
            assert keys.wait(60) == "s"
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)
    with keyboard() as keys:  # pytest has no terminal
        assert not keys.is_available
        assert keys.wait(0) == ""


def test_the_use_of_the_gpu_is_shown_where_it_is_known() -> None:
    assert not any("GPU" in line for line in text_of(NOW, 80))
    for stores in (FIGURES["stores"], {}):
        known = replace(NOW, figures={**FIGURES, "gpu_utilization": 0.87, "stores": stores})
        assert any(line.startswith("GPU 87 %") for line in text_of(known, 40))
