"""Statistics and verdicts as JSON values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import feedline as fl
from feedline.loader.monitoring import monitor
from feedline.loader.report import Advice
from feedline.loader.report.figures import advice_text, figures_of, rates, verdict_figures
from feedline.loader.report.layout import gain_of

WORKERS = Advice("fetch takes 94 ms", {"num_workers": 8}, 4.25, 4.0, 4.5)


def test_advice_has_its_range_or_its_bound() -> None:
    assert advice_text(WORKERS) == "num_workers=8: fetch takes 94 ms (4.2 ×, 4.0–4.5)"
    assert advice_text(Advice("Do less.", {}, 2.0, 1.0, 2.5, "bound")) == "Do less. (at most 2.5 ×)"
    small = Advice("", {"num_workers": 3}, 1.24, 1.18, 1.27, "replayed")
    assert advice_text(small).endswith("(1.24 ×, 1.18–1.27)")
    quick = Advice("", {"num_workers": 3}, 1.24, 1.24, 1.24, "replayed")
    assert advice_text(quick).endswith("(1.24 ×)")
    assert gain_of(quick) == "1.24 ×"


def test_all_figures_are_json() -> None:
    loader = fl.DataLoader(TensorDataset(torch.arange(8)), batch_size=None)
    list(loader)
    verdict = replace(loader.report(), advice=(WORKERS,))
    figures = json.loads(json.dumps({**figures_of(loader.stats()), "verdict": verdict_figures(verdict)}))
    assert figures["batches"] == 8
    assert figures["slowest"][0]["indices"] == [figures["slowest"][0]["number"]]
    (advice,) = figures["verdict"]["advice"]
    assert advice == {
        "text": advice_text(WORKERS),
        "change": "num_workers=8",
        "gain": 4.25,
        "range": "4.2 × (4.0–4.5)",
        "why": "fetch takes 94 ms",
    }


class Pairs(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, pair: Any) -> torch.Tensor:
        return torch.tensor(int(pair[0]))


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple])
def test_indices_of_several_elements_are_text(make: Any, tmp_path: Path) -> None:
    sampler: Any = [make((number, number + 1)) for number in range(40)]
    loader: Any = fl.DataLoader(Pairs(), 4, sampler=sampler, log=tmp_path / "run.jsonl")
    assert len(list(loader)) == 10
    loader.report()
    assert figures_of(loader.stats())["slowest"][0]["indices"][0].startswith(("[", "tensor", "("))


def test_a_loop_survives_figures_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(stats: Any) -> Any:
        raise ValueError("no figures")

    monkeypatch.setattr(monitor, "figures_of", fails)
    monitor._warn_of_figures.cache_clear()
    loader: Any = fl.DataLoader(TensorDataset(torch.arange(8)), log=tmp_path / "run.jsonl")
    assert len(list(loader)) == len(list(loader)) == 8
    assert ["cannot publish the figures" in record.message for record in caplog.records] == [True]


def test_rates_between_two_moments() -> None:
    before, after = {"samples": 10, "wait_s": 1, "step_s": 1}, {"samples": 30, "wait_s": 2, "step_s": 4}
    assert rates(before, after) == (5, 0.25)
    assert rates(after, after) == (0, 0)
