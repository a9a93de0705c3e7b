"""Run logs: one line per interval and epoch, for each rank, bounded, and whole after a crash."""

from __future__ import annotations

import gc
import json
import logging
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import feedline as fl
from feedline.loader.monitoring import monitor
from feedline.loader.monitoring.diagnosis import Arguments
from feedline.loader.report import run_log
from feedline.loader.report.run_log import RunLog, path_of_rank, read_log

DATA = TensorDataset(torch.arange(40))


def test_a_loader_writes_each_epoch(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    loader = fl.DataLoader(DATA, 4, log=path)
    for _ in range(3):
        list(loader)
    lines = read_log(path)
    assert lines[0]["event"] == "interval"
    ends = [line for line in lines if line["event"] == "epoch"]
    assert [(line["epoch"], line["batches"], line["position"]) for line in ends] == [
        (0, 10, 10),
        (1, 20, 10),
        (2, 30, 10),
    ]
    last = lines[-1]
    assert last["loader"].startswith("TensorDataset")
    assert last["settings"]["batch_size"] == 4
    assert last["stages"]["fetch"]["count"] == 30
    assert last["since_epoch"]["batches"] == 10


def test_the_log_of_a_short_run_ends_with_a_verdict_on_all_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    monkeypatch.setattr(monitor, "MOST_NS", 0)  # figures for each batch, as if each took a second
    loader = fl.DataLoader(DATA, 4, log=path)
    during = [loader._fl_monitor.verdict for _ in loader]
    assert "first impression" in during[-1]["explanation"]
    assert "first impression" not in read_log(path)[-1]["verdict"]["explanation"]


STEP_S = 0.02


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1, "worker_method": "thread"}], ids=["inline", "threads"])
def test_each_line_covers_the_time_since_the_loop_began(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "MOST_NS", 0)
    monkeypatch.setattr(monitor, "RunLog", partial(RunLog, first_s=0.0))  # a line for each batch
    path = tmp_path / "run.jsonl"
    loader = fl.DataLoader(DATA, 4, log=path, **arguments)
    began_s = time.time()
    for _ in range(2):
        for _ in loader:
            time.sleep(STEP_S)
    lines = read_log(path)
    assert [line["batches"] for line in lines if line["event"] == "epoch"] == [10, 20]
    assert {line["batches"] for line in lines} >= set(range(1, 20))
    for line in lines:
        assert line["batches"] * STEP_S <= line["wall_s"] <= line["time_s"] - began_s + 0.01
        assert line["wall_s"] == line["wait_s"] + line["step_s"]
        of_epoch = line["since_epoch"]
        assert of_epoch["batches"] * STEP_S <= of_epoch["wall_s"] <= line["wall_s"]
    assert loader.stats().step_s >= 20 * STEP_S
    assert loader.stats().loop["step"].count == 18, "a step is that before a batch"


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1, "worker_method": "thread"}], ids=["inline", "threads"])
def test_a_loader_that_only_its_loop_holds_has_a_verdict_in_its_log(tmp_path: Path, arguments: dict[str, Any]) -> None:
    path = tmp_path / "run.jsonl"
    for _ in fl.DataLoader(DATA, 4, log=path, **arguments):
        gc.collect()  # the loader is gone
    verdict = read_log(path)[-1]["verdict"]
    assert verdict["headline"].startswith("The loop waits for data ")
    assert verdict["limiting_stage"] != "nothing"


def test_the_arguments_of_a_loader_describe_its_loop_as_the_loader_does() -> None:
    loader = fl.DataLoader(DATA, 4, shuffle=True, num_workers=1, worker_method="thread", prefetch_factor=3)
    list(loader)
    assert loader._fl_pools.context(Arguments(loader, len(loader))) == loader._fl_pools.context(loader)


def test_the_variable_names_the_log_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDLINE_LOG", str(tmp_path / "run.jsonl"))
    for rank in range(2):
        list(fl.DataLoader(DATA, 4, seed=0, distributed=(rank, 2)))
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["run.rank0.jsonl", "run.rank1.jsonl"]
    assert {line["rank"] for line in read_log(tmp_path / "run.rank1.jsonl")} == {1}


@pytest.mark.parametrize(
    ("path", "rank", "world_size", "expected"),
    [
        ("run.jsonl", 0, 1, "run.jsonl"),
        ("run.jsonl", 0, 8, "run.rank0.jsonl"),
        ("a.b/run", 3, 8, "a.b/run.rank3"),
        ("log-{rank}.jsonl", 3, 8, "log-3.jsonl"),
        ("log-{rank}.jsonl", 0, 1, "log-0.jsonl"),
    ],
)
def test_paths_of_ranks(path: str, rank: int, world_size: int, expected: str) -> None:
    assert path_of_rank(path, rank, world_size) == Path(expected)


def test_lines_are_written_at_intervals(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.jsonl", first_s=3600, interval_s=3600)
    for number in range(5):
        log.write({"number": number})
    log.write({"number": 5}, "epoch")
    assert [line["number"] for line in read_log(log.path)] == [0, 5]


def test_a_long_run_stays_within_the_bound_and_covers_all_of_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.jsonl", interval_s=0, max_nbytes=20_000)
    for number in range(3000):
        log.write(
            {"time_s": number, "number": number, "filler": "x" * 100}, "epoch" if number % 10 == 0 else "interval"
        )
        assert log.path.stat().st_size <= 20_000 + 200
    numbers = [line["number"] for line in read_log(log.path)]
    assert numbers == sorted(set(numbers))
    assert numbers[0] < 600
    assert numbers[-1] == 2999
    assert max(later - number for number, later in pairwise(numbers)) < 600
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_loader_with_few_lines_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"a": 1}\n')
    train, validation = (RunLog(path, interval_s=0, max_nbytes=4_000) for _ in range(2))
    for number in range(100):
        figures = {"time_s": number, "rank": 0, "number": number, "filler": "x" * 50}
        train.write({"loader": "train", **figures}, "epoch")
        if number % 20 == 0:
            validation.write({"loader": "validation", **figures}, "epoch")
    lines = read_log(path)
    assert [line["number"] for line in lines if line.get("loader") == "validation"] == [0, 20, 40, 60, 80]
    assert 10 < len([line for line in lines if line.get("loader") == "train"]) < 60
    assert {"a": 1} in lines


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"number": 1}) + '\n{"number": 2, "bat')
    assert read_log(path) == [{"number": 1}]


def test_a_log_that_cannot_be_written_ends_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader: Any = fl.DataLoader(DATA, 4, log=tmp_path / "missing" / "run.jsonl")
    with caplog.at_level(logging.WARNING, "feedline"):
        assert len(list(loader)) == len(list(loader)) == 10
    (record,) = caplog.records
    assert "run.jsonl ends here" in record.message


def test_two_loaders_share_a_log(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    loaders = [fl.DataLoader(DATA, 4, log=path) for _ in range(2)]
    for loader in loaders:
        list(loader)
    assert len({line["loader"] for line in read_log(path)}) == 2


def test_the_first_intervals_are_short_and_double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(run_log.time, "monotonic", lambda: clock[0])
    log = RunLog(tmp_path / "run.jsonl", interval_s=10)
    for tenth in range(400):
        clock[0] = tenth / 10
        log.write({"time_s": clock[0]})
    assert [line["time_s"] for line in read_log(log.path)] == [0, 1, 3, 7, 15, 25, 35]
