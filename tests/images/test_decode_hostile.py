"""No content of an image crashes the process: it is read, or refused with an ImageError."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from perturbed import printed_by
from preloaded import Preloaded

SCRIPT = Path(__file__).with_name("images_hostile.py")


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_hostile_images_are_read_or_refused(count: int, preloaded: Preloaded, tmp_path: Path) -> None:
    outcomes = ast.literal_eval(printed_by(preloaded, tmp_path, SCRIPT, str(count), "0"))
    assert outcomes["read"] + outcomes["refused"] == count
    assert min(outcomes.values()) > count / 20, "both must be common, or the mutations test nothing"
