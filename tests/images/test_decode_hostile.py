"""No content of an image crashes the process: it is read, or refused with an ImageError."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("images_hostile.py")
COUNT = 4000


def test_hostile_images_are_read_or_refused() -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(SCRIPT), str(COUNT), "0"],
        env={**os.environ, "PYTHONPATH": paths, "MALLOC_PERTURB_": "165"},  # memory that is not written shows
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = ast.literal_eval(done.stdout)
    assert outcomes["read"] + outcomes["refused"] == COUNT
    assert min(outcomes.values()) > COUNT / 20, "both must be common, or the mutations test nothing"
