"""A short run of mutated files of all formats; `make fuzz` is the long one."""

from __future__ import annotations

from pathlib import Path

from perturbed import printed_by
from preloaded import Preloaded

from formats.hostile import formats

COUNT = 2


def test_damaged_files_of_all_formats_are_read_or_refused(preloaded: Preloaded, tmp_path: Path) -> None:
    script = Path(__file__).with_name("hostile.py")
    printed = printed_by(preloaded, tmp_path, script, "all", str(COUNT), "5")
    assert len(printed.splitlines()) == len(formats())
    assert "refused" in printed
    assert "read" in printed
