"""`kill -9` of workers of streams around the ends of epochs: batches and states stay bit-identical."""

from __future__ import annotations

from pathlib import Path

import pytest
from preloaded import Preloaded
from rounds import rounds

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).parent / "stream_kills.py"


def test_kills_around_the_ends_of_epochs_change_nothing(preloaded: Preloaded, tmp_path: Path) -> None:
    code = preloaded.run(SCRIPT, tmp_path / "output.log", 280, str(rounds(3, 100)), "1")
    assert (code, (tmp_path / "output.log").read_text()) == (0, "")
