"""Statistics and verdicts as JSON values."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch.utils.data import TensorDataset

import feedline as fl
from feedline.loader.report.figures import advice_text, figures_of, rates, verdict_figures


@dataclass
class Predicted:
    """Advice with a gain."""

    gain: float = 4.25
    low: float = 4.0
    high: float = 4.5
    change: str = "num_workers=8"

    def __str__(self) -> str:
        return f"{self.change}: fetch takes 94 ms"


def test_advice_with_and_without_a_gain() -> None:
    assert advice_text("Do less.") == "Do less."
    assert advice_text(Predicted()) == "num_workers=8: fetch takes 94 ms (4.2 ×, 4.0–4.5)"
    assert advice_text(Predicted(gain=1)) == "num_workers=8: fetch takes 94 ms"


def test_all_figures_are_json() -> None:
    loader = fl.DataLoader(TensorDataset(torch.arange(8)), batch_size=None)
    list(loader)
    figures = json.loads(json.dumps({**figures_of(loader.stats()), "verdict": verdict_figures(loader.report())}))
    assert figures["batches"] == 8
    assert figures["slowest"][0]["indices"] == [figures["slowest"][0]["number"]]
    assert {"text", "change", "gain"} == set(figures["verdict"]["advice"][0])


def test_rates_between_two_moments() -> None:
    before, after = {"samples": 10, "wait_s": 1, "step_s": 1}, {"samples": 30, "wait_s": 2, "step_s": 4}
    assert rates(before, after) == (5, 0.25)
    assert rates(after, after) == (0, 0)
