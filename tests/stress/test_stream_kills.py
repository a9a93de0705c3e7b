"""`kill -9` of workers of streams around the ends of epochs: batches and states stay bit-identical."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rounds import rounds

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).parent / "stream_kills.py"


def test_kills_around_the_ends_of_epochs_change_nothing() -> None:
    command = [sys.executable, "-W", "ignore:This DataLoader will create", str(SCRIPT), str(rounds(6, 100)), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
