"""Common loggers: each gets every figure, and its own reader finds it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from logging_loops import LOGGERS, STEPS
from peers import loggers

SCRIPT = Path(__file__).parents[2] / "helpers" / "logging_loops.py"


@pytest.mark.parametrize("logger", LOGGERS)
def test_every_figure_arrives(logger: str, tmp_path: Path) -> None:
    folders = [] if logger == "tensorboard" else [str(loggers())]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), logger, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["feedline/batches"] == STEPS
    assert found["feedline/samples"] == 8 * STEPS
    assert 0 <= found["feedline/wait_share"] <= 1
    assert {"feedline/fetch_mean_s", "feedline/step_p99_s"} <= found.keys()
    assert all(math.isfinite(number) for number in found.values())
