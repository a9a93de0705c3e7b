"""JPEGs of all encoders, whole and damaged: the same files as by Pillow are refused, the others have its pixels."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

COUNT = 2000
ENCODED = 40


def run(script: str, count: int, seed: int, folder: Path) -> dict[str, int]:
    """Counts that a script prints; a failed comparison or a crash fails the test."""
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name(script)), str(count), str(seed)],
        env={**os.environ, "PYTHONPATH": paths, "MALLOC_PERTURB_": "165"},  # memory that is not written shows
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts: dict[str, int] = ast.literal_eval(done.stdout)
    return counts


def test_verdicts_and_pixels_of_damaged_files_are_pillows(tmp_path: Path) -> None:
    outcomes = run("verdicts.py", COUNT, 0, tmp_path)
    assert outcomes["read"] + outcomes["refused"] == COUNT
    assert min(outcomes.values()) > COUNT / 20, "all must be common, or the mutations test nothing"


def test_pixels_of_all_encoders_are_pillows(tmp_path: Path) -> None:
    written = run("encoders.py", ENCODED, 0, tmp_path)
    assert sum(written.values()) == ENCODED
    assert {"Pillow", "crafted"} <= written.keys()
