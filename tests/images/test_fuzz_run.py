"""A run of the fuzz targets under sanitizers, which are compiled for it; `make fuzz` is the long one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

INPUTS = 20_000
TARGETS = 2


@pytest.mark.nightly
def test_mutated_images_neither_crash_nor_differ() -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        ["scripts/fuzz", "--inputs", str(INPUTS)], cwd=root, capture_output=True, text=True, timeout=1_200, check=False
    )
    assert run.returncode == 0, run.stderr[-4_000:]
    counted = [int(line.split()[0]) for line in run.stdout.splitlines() if " inputs of seed " in line]
    assert sum(counted) >= TARGETS * INPUTS
