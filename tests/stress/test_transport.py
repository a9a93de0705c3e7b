"""Errors of workers when the system is out of resources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("scarce", "message"),
    [
        ("size", "10489856 bytes of shared memory for a batch could not be allocated: File too large"),
        ("descriptors", "528384 bytes of shared memory for a batch could not be allocated: Too many open files"),
    ],
)
def test_exhaustion_is_an_error_that_leaves_everything_working(scarce: str, message: str) -> None:
    script = Path(__file__).with_name("transport_limits.py")
    done = subprocess.run([sys.executable, script, scarce], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(message)
    assert "1 slots of 1052672 bytes, 1052672 bytes of them in batches" in done.stdout
