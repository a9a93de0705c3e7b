"""Garbage collections and handlers of signals never wait for a lock that their own thread holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rounds import rounds

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).parent / "garbage.py"


@pytest.mark.parametrize("start_method", ["fork", "forkserver"][: rounds(1, 2)])
def test_nothing_waits_for_a_lock_of_its_own_thread(start_method: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), start_method], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nTrue\n", "")
