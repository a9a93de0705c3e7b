"""A short run of mutated files of all formats; `make fuzz` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
from perturbed import printed_by
from preloaded import Preloaded

from formats.hostile import formats
from formats.suite import FAMILIES


@pytest.mark.parametrize(
    ("names", "count"),
    [pytest.param([*FAMILIES], 2, id="families"), pytest.param([*formats()], 10, id="all", marks=pytest.mark.nightly)],
)
def test_damaged_files_are_read_or_refused(names: list[str], count: int, preloaded: Preloaded, tmp_path: Path) -> None:
    """At night also other formats of each family, with other codecs, types and side files."""
    script = Path(__file__).with_name("hostile.py")
    printed = printed_by(preloaded, tmp_path, script, *names, str(count), "5")
    assert len(printed.splitlines()) == len(names)
    assert "refused" in printed
    assert "read" in printed
