"""No input crashes the process."""

from __future__ import annotations

from pathlib import Path

from perturbed import printed_by
from preloaded import Preloaded

SCRIPT = Path(__file__).with_name("grid_hostile.py")


def test_mutated_files_and_lengths_are_survived(preloaded: Preloaded, tmp_path: Path) -> None:
    rewritten, assembled = map(int, printed_by(preloaded, tmp_path, SCRIPT, "2000", "1").split())
    assert rewritten > 100
    assert assembled > 100
