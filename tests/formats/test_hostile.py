"""A short run of mutated files of all formats; `make fuzz` is the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from formats.hostile import formats

COUNT = 12


def test_damaged_files_of_all_formats_are_read_or_refused(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    extending = tests.parent / "examples/extending"
    paths = [
        str(tests),
        str(tests / "helpers"),
        str(tests / "services"),
        str(extending),
        os.environ.get("PYTHONPATH", ""),
    ]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(tests / "formats/hostile.py"), "all", str(COUNT), "5"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == len(formats())
    assert "refused" in done.stdout
    assert "read" in done.stdout
