"""`kill -9` at any moment, of any of several processes that share one cache: never a wrong byte, and always bounded."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import cache_hammering
import pytest
from cache_hammering import LIMIT, check, reader, taken_nbytes
from rounds import rounds

from feedline import stores

pytestmark = pytest.mark.stress


def test_kills_at_any_moment(tmp_path: Path) -> None:
    hammering = [sys.executable, cache_hammering.__file__, str(tmp_path), str(rounds(30, 300))]
    done = subprocess.run(hammering, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    reported = json.loads(done.stdout)
    assert set(reported["seen"]) == {"."}  # nothing wrong, no error
    assert 0 < reported["most_nbytes"] <= LIMIT
    assert taken_nbytes(str(tmp_path)) <= LIMIT
    comes_clean(tmp_path)


def comes_clean(folder: Path) -> None:
    """A process after the last death finds nothing damaged, removes all leftovers, and can read everything."""
    before, dice, survivor = stores.statistics().cache_damaged, random.Random(8), reader(str(folder))
    assert not any(check(survivor, dice) for _ in range(100))
    assert stores.statistics().cache_damaged == before
    assert not list((folder / "v1/temporary").iterdir())
    assert 0 < taken_nbytes(str(folder)) <= LIMIT
