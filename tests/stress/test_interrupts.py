"""Interrupts at random moments leave no process and no descriptor, and lose no sample."""

from __future__ import annotations

from pathlib import Path

import pytest
from preloaded import Preloaded
from rounds import rounds

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).parent / "interrupts.py"


INTERRUPTS = rounds(15, 35)


@pytest.mark.parametrize("seed", range(rounds(1, 8)))
def test_interrupts_leave_nothing(seed: int, preloaded: Preloaded, tmp_path: Path) -> None:
    code = preloaded.run(SCRIPT, tmp_path / "output.log", 280, str(INTERRUPTS), str(seed))
    assert (code, (tmp_path / "output.log").read_text()) == (0, "")
