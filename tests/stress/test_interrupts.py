"""Interrupts at random moments leave no process and no descriptor, and lose no sample."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rounds import rounds

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).parent / "interrupts.py"


@pytest.mark.parametrize("seed", range(rounds(1, 8)))
def test_interrupts_leave_nothing(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "35", str(seed)], capture_output=True, text=True, check=False, timeout=280
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
