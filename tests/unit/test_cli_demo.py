"""`feedline demo` from the outside, and what it does when the loaders disagree."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import feedline as fl
from feedline.cli import app
from feedline.cli.demo import comparison, show, sources
from feedline.cli.demo.comparison import Outcome, Settings, Side
from feedline.cli.demo.resume import Rehearsal, rehearse
from feedline.cli.demo.training import Run
from feedline.diagnose import StageTimes, Stats, Verdict
from feedline.telemetry import Span

SMALL = ["demo", "--images", "256", "--json"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


def demo(pictures: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(app.app, [*SMALL, "--dir", str(pictures), *options])
    assert result.stdout, result.output
    return result.exit_code, json.loads(result.stdout), result.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_both_loaders_feed_the_same_batches_and_resuming_is_exact(pictures: Path, workers: str) -> None:
    code, summary, screen = demo(pictures, "--workers", workers, "--epochs", "2")
    assert code == 0
    assert summary["equal"]
    assert summary["largest_loss_difference"] == 0
    assert len(summary["feedline"]["losses"]) == 2 * 4
    assert summary["resume"]["checksum"] == summary["resume"]["checksum_uninterrupted"]
    assert summary["resume"]["state_nbytes"] < 1024
    for loader in ("torch", "feedline"):
        assert {"fetch", "collate"} <= set(summary[loader]["stages_s"])
        assert summary[loader]["verdict"]["headline"].split()[0] in screen


def test_the_exit_code_is_1_when_losses_differ(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(fl.DataLoader[Any]):
        def __iter__(self) -> Any:
            return ((images + 1e-3, labels) for images, labels in super().__iter__())

    monkeypatch.setattr(comparison.fl, "DataLoader", Wrong)
    code, summary, screen = demo(pictures, "--workers", "0")
    assert code == 1
    assert not summary["equal"]
    assert summary["largest_loss_difference"] > 0
    assert "losses differ" in " ".join(screen.split())


def run(losses: tuple[float, ...]) -> Run:
    spans = (Span("wait", 0, 2_000_000_000), Span("step", 2_000_000_000, 3_000_000_000))
    return Run(losses, accuracy=0.5, images=300, spans=spans)


def side(losses: tuple[float, ...], words: str) -> Side:
    stages = {"fetch": StageTimes(2, 0.25, 0.1, 0.2, (0, 1)), "encode": StageTimes(2, 0.004, 0.001, 0.002, (0, 1))}
    stats = Stats(batches=2, stages=stages)
    return Side(0.75, run(losses), stats, Verdict("fetch", 0.67, words, "", ("More of that.",)))


REHEARSAL = Rehearsal('{"feedline": 1}', (2, 1), ("a", "b", "c"), ("a",), ("b", "c"))
TORCH, FEEDLINE = (
    side((2.5, 0.5), "Loading limits this loop. " * 6 + "a.name.longer.than.any.column.is.wide.in.60.columns"),
    side((2.5, 0.5), "Training limits. " * 9),
)
OUTCOME = Outcome(TORCH, FEEDLINE, REHEARSAL)


def screen(renderable: Any, columns: int) -> str:
    output = StringIO()
    Console(width=columns, file=output).print(renderable)
    return output.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_results_fit_the_terminal_and_nothing_is_cut_off(columns: int) -> None:
    shown = screen(show.trainings(OUTCOME, Settings(1, 2, 0)), columns) + screen(show.resumed(REHEARSAL), columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    figures = (
        "100",
        "3.0 s",
        "750 ms",
        "2000 ms",
        "2.0 s (67%)",
        "1.0 s (33%)",
        "125.0 ms",
        "2.0 ms",
        "2.500 → 0.500",
        "50%",
    )
    for figure in figures:
        assert figure in shown
    assert shown.count("Loading") == 6
    assert "60.columns" in shown
    assert shown.count("Training") == 9


def test_runs_of_other_losses_or_other_lengths_are_not_equal() -> None:
    assert OUTCOME.equal
    assert OUTCOME.largest_difference == 0
    other = replace(OUTCOME, feedline=side((2.5, 0.25), ""))
    assert (other.equal, other.largest_difference) == (False, 0.25)
    shorter = replace(OUTCOME, feedline=side((2.5,), ""))
    assert (shorter.equal, shorter.largest_difference) == (False, float("inf"))
    assert not replace(OUTCOME, rehearsal=replace(REHEARSAL, after=("c", "b"))).equal


def test_a_loader_that_repeats_a_batch_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(60.0), torch.arange(60))
    arguments: dict[str, Any] = {"batch_size": 5, "seed": 0, "workers": (0, 0)}
    assert rehearse(data, **arguments).equal

    honest = fl.DataLoader.load_state_dict

    def forgetful(loader: fl.DataLoader[Any], state: dict[str, Any]) -> None:
        honest(loader, {**state, "position": state["position"] - 5})

    monkeypatch.setattr(fl.DataLoader, "load_state_dict", forgetful)
    assert not rehearse(data, **arguments).equal


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 2), (2, 1), (8, 7)])
def test_resuming_takes_another_number_of_workers(first: int, second: int) -> None:
    assert Settings(1, first, 0).resumed_workers() == second


@pytest.mark.parametrize("photo", sources.PHOTOS, ids=lambda photo: photo.label)
def test_the_photographs_are_in_the_packages_that_the_demo_installs(photo: sources.Photo) -> None:
    pixels = sources.pixels(photo)
    assert pixels.mode == "RGB"
    assert min(pixels.size) >= 300


def test_the_digits_are_all_there() -> None:
    scans, digits = sources.digits()
    assert scans.shape == (1797, 8, 8)
    assert scans.max() == 255
    assert set(digits) == set(range(10))


def test_only_commands_that_work_are_listed() -> None:
    listed = CliRunner().invoke(app.app, ["--help"])
    commands = {command.name or command.callback.__name__ for command in app.app.registered_commands}
    assert commands == {"demo", "doctor", "index", "inspect", "pack"}
    assert all(command in listed.stdout for command in commands)


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("feedline ")


def test_errors_are_explained_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setattr("sys.argv", ["feedline", "demo", "--dir", str(occupied)])
    with pytest.raises(SystemExit) as exit_:
        app.main()
    assert exit_.value.code == 2
    told = capsys.readouterr().err
    assert str(occupied) in told.replace("\n", "")
    assert "--dir" in told
    assert "Traceback" not in told
