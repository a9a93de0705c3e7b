"""Common loggers: each gets every figure, and its own reader finds it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from diagonals import by_day
from logging_loops import LOGGERS, STEPS
from peers import loggers
from preloaded import Preloaded

SCRIPT = Path(__file__).parents[2] / "helpers" / "logging_loops.py"


@pytest.mark.parametrize("logger", by_day([*LOGGERS], ["tensorboard", "mlflow"]))
def test_every_figure_arrives(logger: str, preloaded: Preloaded, tmp_path: Path) -> None:
    folders = [] if logger == "tensorboard" else [str(loggers())]
    results, log = tmp_path / "results.json", tmp_path / "output.log"
    assert preloaded.run(SCRIPT, log, 240, logger, str(results), *folders) == 0, log.read_text()
    found = json.loads(results.read_text())
    assert found["feedline/batches"] == STEPS
    assert found["feedline/samples"] == 8 * STEPS
    assert 0 <= found["feedline/wait_share"] <= 1
    assert {"feedline/fetch_mean_s", "feedline/step_p99_s"} <= found.keys()
    assert all(math.isfinite(number) for number in found.values())
