"""Errors of workers when the system is out of resources."""

from __future__ import annotations

from pathlib import Path

import pytest
from preloaded import Preloaded


@pytest.mark.parametrize(
    ("scarce", "message"),
    [
        ("size", "10489856 bytes of shared memory for a batch could not be allocated: File too large"),
        ("descriptors", "528384 bytes of shared memory for a batch could not be allocated: Too many open files"),
    ],
)
def test_exhaustion_is_an_error_that_leaves_everything_working(
    scarce: str, message: str, preloaded: Preloaded, tmp_path: Path
) -> None:
    script, log = Path(__file__).with_name("transport_limits.py"), tmp_path / "output.log"
    assert preloaded.run(script, log, 240, scarce) == 0, log.read_text()
    (said,) = log.read_text().splitlines()  # and nothing on standard error
    assert said.startswith(message)
    assert "1 slots of 1052672 bytes, 1052672 bytes of them in batches" in said
