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
from feedline.cli.attempt import Attempt, Budget, attempt, parse_arguments
from feedline.cli.bench.trial import Round, measure
from feedline.cli.doctor import command as doctor
from feedline.errors import ArgumentError
from feedline.loader.dataloader import DataLoader
from feedline.loader.monitoring.diagnosis import with_lines
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


ENDLESS = Budget(10.0, lambda: 0.0)
"""Its clock stands still: no round is left out."""


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real rounds of 50 ms, whatever the time, and a look at the lines of the code that is as short."""
    monkeypatch.setattr(attempting, "measure", lambda made, _, step_s, **__: measure(made, 0.05, step_s))
    monkeypatch.setattr(attempting, "with_lines", lambda verdict, loader, _: with_lines(verdict, loader, 0.05))


def test_arguments_are_literals_or_words() -> None:
    texts = ["num_workers=4", "worker_method=thread", "in_order=False", "batch_size=None"]
    parsed = parse_arguments(texts)
    assert parsed == {"num_workers": 4, "worker_method": "thread", "in_order": False, "batch_size": None}
    assert parse_arguments(["num_workers={[]: 1}"]) == {"num_workers": "{[]: 1}"}, "a literal without a value"


@pytest.mark.parametrize("text", ["num_workers", "num_worker=3", "dataset=x", "=4"])
def test_what_is_no_argument_of_the_loader_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="--set takes an argument"):
        parse_arguments([text])


def test_more_workers_are_measured_and_predicted_and_the_loader_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = DataLoader(Waits(), batch_size=2, num_workers=1, worker_method="thread", seed=0)
    tried = list[int]()

    def by_workers(made: TorchDataLoader[Any], _: float, step_s: float, **__: float) -> Round:
        """A real round, with a rate that no other program can change."""
        tried.append(made.num_workers)
        return measure(made, 0.05, step_s)._replace(samples=100 * made.num_workers, seconds=1.0)

    monkeypatch.setattr(attempting, "measure", by_workers)
    monkeypatch.setattr(attempting, "with_lines", lambda verdict, *_: verdict)
    result = attempt(loader, {"num_workers": 4}, ENDLESS, 0.0, silent)
    assert tried == [1, 4] * attempting.ROUNDS
    assert (result.before, result.after) == ((100.0,) * 3, (400.0,) * 3)
    assert result.measured == (4.0, 4.0, 4.0)
    assert result.unfinished == ""
    assert result.predicted == result.verdict.predict(num_workers=4)
    assert loader.num_workers == 1
    assert loader.stats().batches == 0


@pytest.mark.usefixtures("brief")
def test_without_arguments_the_first_advice_is_tried() -> None:
    loader = DataLoader(Waits(), batch_size=2, num_workers=1, worker_method="thread")
    result = attempt(loader, {}, ENDLESS, 0.0, silent)
    advised = [advice.arguments for advice in result.verdict.advice if advice.arguments]
    assert result.arguments == next(iter(advised), {})
    assert result.verdict.replayed is not None
    assert len(result.after) == (attempting.ROUNDS if advised else 0)


@pytest.mark.usefixtures("brief")
def test_what_the_model_does_not_know_is_only_measured() -> None:
    loader = DataLoader(Waits(), batch_size=2, num_workers=1, worker_method="thread")
    assert attempt(loader, {"batch_size": 4}, ENDLESS, 0.0, silent).predicted is None


def test_nothing_to_try() -> None:
    result = attempt(TorchDataLoader(torch.arange(1000), batch_size=2), {}, Budget(1.0), 0.03, silent)
    assert not result.arguments
    assert "no argument to try" in shown(result, 80)


class Simulated:
    """A clock that only measurements move, and measurements with this start of one and of four workers."""

    def __init__(self, *starts_s: float) -> None:
        self.now_s, self.began_s = 100.0, list[float]()
        self.starts_s = dict(zip((1, 4), starts_s, strict=True))

    def clock(self) -> float:
        return self.now_s

    def measure(self, made: TorchDataLoader[Any], _: float, __: float, *, due_s: float, over_s: float) -> Round:
        """Batches arrive 0.1 s apart, after the start."""
        self.began_s.append(self.now_s)
        first_s = self.starts_s[made.num_workers]
        start_s = self.now_s + first_s + 0.1 * made.num_workers
        self.now_s = max(start_s + 0.1 * made.num_workers, min(due_s, over_s))
        part = measure(made, 0.0, 0.0)  # the verdict needs some batches
        if self.now_s > over_s:
            self.now_s = max(self.began_s[-1] + first_s, over_s)
            return part._replace(samples=0, seconds=0.0, waits_s=(), first_s=first_s)
        waits = (0.1,) * round((self.now_s - start_s) / 0.1)
        return part._replace(samples=len(waits), seconds=self.now_s - start_s, waits_s=waits, first_s=first_s)


@pytest.mark.parametrize(
    ("starts_s", "rounds", "missing"),
    [
        ((0.2, 0.5), 3, ""),
        ((0.5, 2.0), 2, "2 of 3 rounds fitted into 10 s: one takes 3.5 s or more, the verdict 0 s. All may"),
        ((2.0, 5.0), 1, "1 of 3 rounds fitted into 10 s: one takes 8.0 s or more"),
        ((2.0, 9.0), 1, "1 of 3 rounds fitted into 10 s: one takes 12 s or more"),
        ((11.0, 1.0), 1, "1 of 3 rounds fitted into 10 s: one takes 13 s or more"),
        ((2.0, 19.0), 0, "0 of 3 rounds fitted into 10 s: the first batch of the changed loader took 19 s. All may"),
        ((21.0, 1.0), 0, "0 of 3 rounds fitted into 10 s: the first batch of the unchanged loader took 21 s. All may"),
    ],
)
def test_the_time_includes_the_start_of_workers_and_what_it_was_too_short_for_is_said(
    starts_s: tuple[float, float], rounds: int, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = Simulated(*starts_s)
    monkeypatch.setattr(attempting, "measure", simulated.measure)
    monkeypatch.setattr(attempting, "with_lines", lambda verdict, *_: verdict)
    loader = DataLoader(torch.arange(400), batch_size=2, num_workers=1, worker_method="thread")
    result = attempt(loader, {"num_workers": 4}, Budget(10.0, simulated.clock), 0.0, silent)
    assert len(result.after) == rounds
    assert (result.measured is None) is (rounds == 0)
    assert all(began_s < 110.0 for began_s in simulated.began_s[2:])
    over_s = 110.0 if len(simulated.began_s) > 2 else 120.0  # the first round may take twice as long
    assert simulated.now_s <= max(over_s, simulated.began_s[-1] + max(starts_s))
    assert result.unfinished.startswith(missing)
    assert bool(result.unfinished) is (rounds < attempting.ROUNDS)
    if missing:
        assert int(result.unfinished.rpartition(" ")[2].rstrip(".")) >= 20
        assert "0 of 3" not in missing or "not measured" in shown(result, 40)
    assert max(map(len, shown(result, 40).splitlines())) <= 40


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


@pytest.mark.usefixtures("brief")
def test_the_command_prints_one_json_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempting, "Budget", lambda seconds: Budget(seconds, lambda: 0.0))
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
