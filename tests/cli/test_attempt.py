"""`feedline try`: measured and predicted gain of changed arguments."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset
from typer.testing import CliRunner

from feedline.cli import attempt as attempting
from feedline.cli.app import app
from feedline.cli.attempt import Attempt, attempt, parse_arguments
from feedline.cli.bench.trial import Round, measure
from feedline.cli.doctor import command as doctor
from feedline.errors import ArgumentError
from feedline.loader.dataloader import DataLoader
from feedline.loader.report import Verdict
from feedline.loader.report.model import Gain


class Waits(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.zeros(2)


def silent(*_: object) -> None:
    """A progress bar that shows nothing."""


def test_arguments_are_literals_or_words() -> None:
    texts = ["num_workers=4", "worker_method=thread", "in_order=False", "batch_size=None"]
    parsed = parse_arguments(texts)
    assert parsed == {"num_workers": 4, "worker_method": "thread", "in_order": False, "batch_size": None}


@pytest.mark.parametrize("text", ["num_workers", "num_worker=3", "dataset=x", "=4"])
def test_what_is_no_argument_of_the_loader_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="--set takes an argument"):
        parse_arguments([text])


def test_more_workers_are_measured_and_predicted_and_the_loader_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = DataLoader(Waits(), batch_size=2, num_workers=1, worker_method="thread", seed=0)
    tried = list[int]()

    def by_workers(made: TorchDataLoader[Any], seconds: float, step_s: float) -> Round:
        """A real round, with a rate that no other program can change."""
        tried.append(made.num_workers)
        return measure(made, seconds, step_s)._replace(samples=100 * made.num_workers, seconds=1.0)

    monkeypatch.setattr(attempting, "measure", by_workers)
    result = attempt(loader, {"num_workers": 4}, 0.05, 0.0, silent)
    assert tried == [1, 4] * attempting.ROUNDS
    assert (result.before, result.after) == ((100.0,) * 3, (400.0,) * 3)
    assert result.measured == (4.0, 4.0, 4.0)
    assert result.predicted == result.verdict.predict(num_workers=4)
    assert loader.num_workers == 1
    assert loader.stats().batches == 0


def test_without_arguments_the_first_advice_is_tried() -> None:
    loader = DataLoader(Waits(), batch_size=2, num_workers=1, worker_method="thread")
    result = attempt(loader, {}, 0.05, 0.0, silent)
    advised = [advice.arguments for advice in result.verdict.advice if advice.arguments]
    assert result.arguments == next(iter(advised), {})
    assert len(result.after) == (attempting.ROUNDS if advised else 0)


def test_what_the_model_does_not_know_is_only_measured() -> None:
    loader = DataLoader(Waits(), batch_size=2, num_workers=1, worker_method="thread")
    assert attempt(loader, {"batch_size": 4}, 0.05, 0.0, silent).predicted is None


def test_nothing_to_try() -> None:
    result = attempt(TorchDataLoader(torch.arange(1000), batch_size=2), {}, 0.1, 0.03, silent)
    assert not result.arguments
    assert "no argument to try" in shown(result, 80)


def shown(result: Attempt, columns: int, encoding: str = "utf-8") -> str:
    output = StringIO()
    console = Console(width=columns, file=output)
    console._encoding = encoding  # type: ignore[attr-defined]
    attempting.show(result, console)
    return output.getvalue()


def test_the_outcome_fits_a_narrow_terminal() -> None:
    verdict = Verdict("fetch", 0.5, "", "")
    result = Attempt({"num_workers": 10}, verdict, (100.0,) * 3, (300.0, 310.0, 290.0), Gain(3.2, 2.9, 3.4))
    lines = shown(result, 40).splitlines()
    assert lines[0] == "num_workers=10: 100 → 300 samples/s"
    assert lines[1] == "measured  3.0 × (2.9–3.1)"
    assert lines[2] == "predicted 3.2 × (2.9–3.4)"


def test_the_command_prints_one_json_object(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, feedline as fl\n"
        "loader = fl.DataLoader(torch.arange(4000), batch_size=2, num_workers=1, worker_method='thread')\n"
    )
    outcome = CliRunner().invoke(
        app, ["try", f"{script}:loader", "--set", "num_workers=2", "--seconds", "0.3", "--json"]
    )
    assert outcome.exit_code == 0, outcome.output
    summary = json.loads(outcome.stdout)
    assert summary["arguments"] == {"num_workers": 2}
    assert summary["measured"]["gain"] > 0


BROKEN = """
import torch, feedline as fl
class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        raise KeyError("no row")
loader = fl.DataLoader(Broken(), batch_size=2)
empty = fl.DataLoader(torch.arange(0), batch_size=2)
"""


@pytest.mark.parametrize(("name", "problem"), [("loader", "KeyError: 'no row'"), ("empty", "has no batches")])
def test_a_loader_without_batches_is_one_clear_error(name: str, problem: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BROKEN)
    outcome = CliRunner().invoke(app, ["try", f"{script}:{name}", "--seconds", "0.3"])
    assert isinstance(outcome.exception, ArgumentError)  # which `main` prints without a traceback
    assert problem in str(outcome.exception)


def test_doctor_names_an_error_of_samples_once_and_a_remedy_that_fits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BROKEN)
    texts = [finding.evidence for finding in doctor.run(f"{script}:loader").loader]
    assert sum("no row" in text for text in texts) == 1
    (missing,) = doctor.run(f"{tmp_path / 'typo.py'}:loader").loader
    assert "path" in missing.remedy
