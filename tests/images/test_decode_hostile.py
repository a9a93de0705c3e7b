"""No content of an image crashes the process: it is read, or refused with an ImageError."""

from __future__ import annotations

import ast
from pathlib import Path

from perturbed import printed_by
from preloaded import Preloaded

SCRIPT = Path(__file__).with_name("images_hostile.py")
COUNT = 4000


def test_hostile_images_are_read_or_refused(preloaded: Preloaded, tmp_path: Path) -> None:
    outcomes = ast.literal_eval(printed_by(preloaded, tmp_path, SCRIPT, str(COUNT), "0"))
    assert outcomes["read"] + outcomes["refused"] == COUNT
    assert min(outcomes.values()) > COUNT / 20, "both must be common, or the mutations test nothing"
