"""No input ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("grid_hostile.py")
TESTS = SCRIPT.parents[1] / "helpers"


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_files_and_lengths_are_survived(seed: int) -> None:
    command = [sys.executable, str(SCRIPT), "1500", str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "MALLOC_PERTURB_": "165"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    rewritten, assembled = map(int, done.stdout.split())
    assert rewritten > 100
    assert assembled > 100
