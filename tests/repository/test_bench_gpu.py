"""Scripts for a GPU run without one, with "cpu" as their argument."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "bench" / "gpu"


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("decode.py", ("feedline, workers", "feedline, on the device", "by workers", "decoded on the device")),
    ],
)
def test_a_script_for_a_gpu_runs_on_the_cpu(script: str, lines: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, str(GPU / script), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout for line in lines), done.stdout
