"""Bounded: a dataset in memory exists once for all workers, and nothing grows from epoch to epoch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from diagonals import at_night
from preloaded import Preloaded
from rounds import rounds

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).with_name("memory_training.py")
SMALL_MIB, LARGE_MIB = 16, 96
WITHIN_S = 240
EPOCHS = rounds(10, 50)


def weighed(preloaded: Preloaded, log: Path, *arguments: str) -> Any:
    """The figures in the last line of `memory_training.py`."""
    assert preloaded.run(SCRIPT, log, WITHIN_S, *arguments) == 0, log.read_text()
    return json.loads(log.read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("how", "copies"),
    [([], 2), (["--shared", "--method", "fork"], 1), *at_night((["--shared"], 1))],
    ids=["own array", "shared, fork", "shared"],
)
def test_workers_add_one_copy_of_a_dataset_in_memory_and_none_of_a_shared_one(
    preloaded: Preloaded, tmp_path: Path, how: list[str], copies: int
) -> None:
    """By proportional set size: shared pages count as their share, so that the sum is the memory used.

    Mapped files do not count. So the tests that run at the same time, with the same libraries, change nothing.

    The training process keeps its own array; all workers together hold one sealed copy of it.
    """
    small, large = (
        weighed(preloaded, tmp_path / "output.log", "shares", "--mib", str(mib), "--workers", "3", *how)
        for mib in (SMALL_MIB, LARGE_MIB)
    )
    assert large["processes"] >= 3
    assert large["processes"] == small["processes"]
    grown = LARGE_MIB - SMALL_MIB
    assert large["family"] + large["self"] - small["family"] - small["self"] < (copies + 0.2) * grown


PLACES = """
import numpy as np
import feedline as fl

rows = np.zeros((20_000, 100), np.float32)
print(len({batch.data_ptr() for batch in fl.DataLoader(rows, batch_size=1000, sampler=[*range(20_000)] * 10)}))
"""


def test_batches_lie_in_the_memory_of_those_before_them(preloaded: Preloaded, tmp_path: Path) -> None:
    """A small block that outlives a batch, in the memory of the previous one, would move the next one to new pages."""
    code, output = preloaded.run_code(PLACES, tmp_path)
    assert code == 0, output
    assert int(output) < 50, f"200 batches were in {output.strip()} places"


@pytest.fixture(scope="module")
def epochs() -> list[Any]:
    """The figures of epochs with new workers, and then with persistent ones.

    In a fresh interpreter: a fork grows by the pages that it copies.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "epochs", "--epochs", str(EPOCHS)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("persistent", [False, True], ids=["new", "persistent"])
def test_nothing_grows_over_many_epochs(epochs: list[Any], persistent: bool) -> None:
    early, late = epochs[persistent]
    assert len(early) == len(late) == EPOCHS // 5
    for name, allowed in (("rss", 1.0), ("family", 4.0), ("descriptors", 0), ("threads", 0)):
        growth = median(weight[name] for weight in late) - median(weight[name] for weight in early)
        assert growth <= allowed, f"{name} grew by {growth}: {[weight[name] for weight in early + late]}"
