"""JPEGs of all encoders, whole and damaged: the same files as by Pillow are refused, the others have its pixels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from perturbed import printed_by
from preloaded import Preloaded

HERE = Path(__file__).parent


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_verdicts_and_pixels_of_damaged_files_are_pillows(count: int, preloaded: Preloaded, tmp_path: Path) -> None:
    outcomes = ast.literal_eval(printed_by(preloaded, tmp_path, HERE / "verdicts.py", str(count), "0"))
    assert outcomes["read"] + outcomes["refused"] == count
    assert min(outcomes.values()) > count / 20, "all must be common, or the mutations test nothing"


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.nightly)])
def test_pixels_of_all_encoders_are_pillows(count: int, preloaded: Preloaded, tmp_path: Path) -> None:
    written = ast.literal_eval(printed_by(preloaded, tmp_path, HERE / "encoders.py", str(count), "0"))
    assert sum(written.values()) == count
    assert {"Pillow", "crafted"} <= written.keys()
