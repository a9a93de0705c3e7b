"""No input crashes the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("grid_hostile.py")
TESTS = SCRIPT.parents[1] / "helpers"


def test_mutated_files_and_lengths_are_survived() -> None:
    command = [sys.executable, str(SCRIPT), "2000", "1"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "MALLOC_PERTURB_": "165"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    rewritten, assembled = map(int, done.stdout.split())
    assert rewritten > 100
    assert assembled > 100
