"""Loaders that raise: verdict, page, run log and `feedline top` name the error, its sample and the address."""

from __future__ import annotations

import os
import re
from pathlib import Path
from pickle import PicklingError
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset
from typer.testing import CliRunner

import feedline as fl
from feedline.cli.app import app
from feedline.cli.top.reading import read_all
from feedline.cli.top.screen import screen
from feedline.loader.report.page_html import errors_of
from feedline.loader.report.raised import RaisedError
from feedline.loader.report.run_log import read_log
from feedline.loader.report.runs import reports_of_logs

PROCESSES = {"num_workers": 2, "worker_method": "process"}
THREADS = {"num_workers": 2, "worker_method": "thread"}


class Rows(Dataset[torch.Tensor]):
    """Row 21 cannot be read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 21:
            raise KeyError("no <row>")
        return torch.zeros(4)

    def address(self, index: int) -> tuple[str, int]:
        return "train-0001.tar", 7 * index


def refuse(samples: list[Any]) -> Any:
    raise ValueError("shapes <differ>\nby far")


def cannot_begin(worker: int) -> None:
    raise RuntimeError("no <database>")


def iterate(loader: fl.DataLoader[Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        list(loader)


def headings(html: str) -> list[str]:
    return re.findall("<h2>([^<]*)</h2>", html)


@pytest.mark.parametrize(
    ("arguments", "kind", "headline", "details"),
    [
        ({}, KeyError, "KeyError after 5 batches: 'no <row>'", "Sample 21 of Rows (epoch 0, position 21"),
        (THREADS, KeyError, "KeyError after 5 batches: 'no <row>'", "147 of train-0001.tar; on_error='skip'"),
        (PROCESSES, KeyError, "KeyError after 5 batches: 'no <row>'", "147 of train-0001.tar; on_error='skip'"),
        (
            {"collate_fn": refuse},
            ValueError,
            "ValueError before its first batch: shapes <differ>",
            "While the collate stage worked on batch 0 of epoch 0",
        ),
        (
            {**PROCESSES, "worker_init_fn": cannot_begin},
            RuntimeError,
            "RuntimeError before its first batch: no <database>",
            "Raised by worker_init_fn.",
        ),
        (
            {**PROCESSES, "multiprocessing_context": "spawn", "worker_init_fn": lambda _: None},
            PicklingError,
            "PicklingError before its first batch: Can't pickle <function <lambda>",
            "",
        ),
    ],
    ids=["inline", "threads", "processes", "collate", "init", "no-start"],
)
def test_an_error_comes_first_wherever_it_came_from(
    arguments: dict[str, Any], kind: type[Exception], headline: str, details: str, tmp_path: Path
) -> None:
    log, out = tmp_path / "run.jsonl", tmp_path / "report.html"
    with fl.DataLoader(Rows(), 4, log=log, **arguments) as loader:
        iterate(loader, kind)
        verdict = loader.report()
        verdict.to_html(out)
    text = " ".join(verdict.text(80).split())
    assert text.startswith(f"The loader raised {headline}")
    assert details in verdict.raised
    assert verdict.headline.split()[0] in text.removeprefix(verdict.raised), "the rest stays"
    page, (last,) = out.read_text(), read_log(log)[-1:]
    assert headings(page)[0].startswith(
        f"The loader raised {headline}".replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;")
    )
    assert last["event"] == "raised"
    outcome = CliRunner().invoke(app, ["report", str(log), "--out", str(out)])
    assert outcome.exit_code == 0, outcome.exception
    assert f"The loader raised {headline}" in " ".join(outcome.stdout.split())
    assert headings(out.read_text())[0] == headings(page)[0]
    assert "Where the time goes" in out.read_text()


def test_a_loop_that_goes_on_keeps_its_error_as_a_note(tmp_path: Path) -> None:
    loader = fl.DataLoader(Rows(), 4)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    with pytest.raises(KeyError):
        next(batches)
    assert loader.report().raised.startswith("The loader raised KeyError")
    next(batches)
    verdict = loader.report()
    assert verdict.raised == ""
    assert any(
        note.startswith("The loader raised KeyError and went on after 5 batches: 'no <row>'. Sample 21")
        for note in verdict.notes
    )
    loader.report_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert not headings(page)[0].startswith("The loader raised")
    assert "and went on after 5 batches" in page
    again = iter(loader)
    assert loader.report().raised == ""
    with pytest.raises(KeyError):
        list(again)
    assert loader.report().raised.startswith("The loader raised KeyError after 11 batches: 'no <row>'")


def test_an_error_before_the_first_iteration_is_named(tmp_path: Path) -> None:
    loader: Any = fl.DataLoader(Rows(), 4, num_workers=0)
    loader.timeout = 5
    iterate(loader, AssertionError)
    assert loader.report().raised.startswith(
        "The loader raised AssertionError before its first batch: timeout=5 needs num_workers"
    )
    with pytest.raises(fl.errors.ArgumentError, match=r"nothing to report\. The loader raised AssertionError"):
        loader.report_html(tmp_path / "report.html")


def test_the_first_of_the_ranks_that_raised_is_first(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    iterate(fl.DataLoader(Rows(), 4, log=log), KeyError)
    (last,) = read_log(log)[-1:]
    lines = []
    for rank in range(7):
        raised = {**last["raised"], "time_s": 1000.0 - rank, "message": f"{rank}"} if rank < 6 else None
        lines.append({**last, "rank": rank, "world_size": 7, "pid": rank, "raised": raised})
    reports, _ = reports_of_logs(lines)
    assert [headline for headline, _ in errors_of(reports)] == [
        *(f"Rank {rank} raised KeyError after 5 batches: {rank}" for rank in (5, 4, 3, 2)),
        "Other ranks and loaders raised 2 more errors",
    ]


def test_the_live_view_names_the_error_until_the_loop_goes_on() -> None:
    with fl.DataLoader(Rows(), 4) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        with pytest.raises(KeyError):
            next(batches)
        for width in (40, 80):
            (now,) = [
                each
                for each in read_all(os.getpid())
                if each.figures["loader"] == loader._fl_monitor.identity["loader"]
            ]
            lines = [line.plain for line in screen(None, now, width)]
            assert max(map(len, lines)) <= width
            place = next(place for place, line in enumerate(lines) if line.startswith("error  "))
            assert lines[place] == "error  KeyError: 'no <row>'"
            assert lines[place + 1].startswith("       Sample 21 of Rows")
        next(batches)
        (now,) = [
            each for each in read_all(os.getpid()) if each.figures["loader"] == loader._fl_monitor.identity["loader"]
        ]
        assert not any(line.plain.startswith("error") for line in screen(None, now, 80))


class Slow(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        sleep(0.02)
        return super().__getitem__(index)


@pytest.mark.parametrize("bad", [0, 21], ids=["first", "later"])
def test_the_time_until_an_error_counts_once(bad: int) -> None:
    loader = fl.DataLoader(Subset(Slow(), [21 if place == bad else 0 for place in range(24)]), 4)
    began_s, batches = perf_counter(), iter(loader)
    while True:
        try:
            next(batches)
        except StopIteration:
            break
        except KeyError:
            stats = loader.stats()
            assert stats.wait_s >= 0.02 * (bad + 1)
            assert stats.wait_s + stats.step_s <= perf_counter() - began_s
        sleep(0.03)
        assert loader.stats().wall_s <= perf_counter() - began_s
    stats, passed_s = loader.stats(), perf_counter() - began_s
    assert stats.step_s >= 0.03 * stats.batches
    assert stats.wait_s >= 0.02 * 21
    assert stats.wall_s <= passed_s
    assert stats.since_epoch is not None
    assert stats.since_epoch.wall_s == stats.wall_s


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Wordless(), "Wordless before its first batch."),
        (ValueError(), "ValueError before its first batch."),
        (ValueError("\n\n the first.\nsecond"), "ValueError before its first batch: the first."),
        (ValueError("x" * 10_000), f"ValueError before its first batch: {'x' * 500} …"),
    ],
)
def test_errors_without_a_usual_message(error: Exception, text: str) -> None:
    assert RaisedError.of(error, 0).text == f"The loader raised {text}"
