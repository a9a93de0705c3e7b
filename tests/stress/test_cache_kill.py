"""`kill -9` at any moment, of any of several processes that share one cache: never a wrong byte, and always bounded."""

from __future__ import annotations

import json
import random
from pathlib import Path

import cache_hammering
import pytest
from cache_hammering import LIMIT, check, reader, taken_nbytes
from preloaded import Preloaded
from rounds import rounds

from feedline import stores

pytestmark = pytest.mark.stress


def test_kills_at_any_moment(preloaded: Preloaded, tmp_path: Path) -> None:
    log, folder = tmp_path / "output.log", tmp_path / "cache"
    assert preloaded.run(Path(cache_hammering.__file__), log, 240, str(folder), str(rounds(30, 300))) == 0
    reported = json.loads(log.read_text())  # nothing else is said
    assert set(reported["seen"]) == {"."}  # nothing wrong, no error
    assert 0 < reported["most_nbytes"] <= LIMIT
    assert taken_nbytes(str(folder)) <= LIMIT
    comes_clean(folder)


def comes_clean(folder: Path) -> None:
    """A process after the last death finds nothing damaged, removes all leftovers, and can read everything."""
    before, dice, survivor = stores.statistics().cache_damaged, random.Random(8), reader(str(folder))
    assert not any(check(survivor, dice) for _ in range(100))
    assert stores.statistics().cache_damaged == before
    assert not list((folder / "v1/temporary").iterdir())
    assert 0 < taken_nbytes(str(folder)) <= LIMIT
