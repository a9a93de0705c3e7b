"""The audit of a job whose processes are killed at random, and that continues with other numbers of ranks each time.

`test_audit_kills.py 100` makes 100 kills, and prints the findings of the audit.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import pytest
from audit_rank import SAMPLES
from preloaded import Preloaded
from rounds import rounds

from feedline.loader.report.attempts import Audit
from feedline.loader.report.audit import audit
from feedline.loader.report.audit_log import read_audit_log

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).with_name("audit_rank.py")
WITHIN_S = 60.0


def states_of(folder: Path, world: int) -> list[list[bytes]]:
    """Complete states of each rank, step by step."""
    files = [folder / f"states.{rank}" for rank in range(world)]
    return [file.read_bytes().split(b"\n")[:-1] if file.exists() else [] for file in files]


def attempt(folder: Path, world: int, steps: int | None, state: Path, preloaded: Preloaded) -> None:
    """Run all ranks; kill them when the slowest has made `steps`, and keep their latest common state."""
    for old in folder.glob("states.*"):
        old.unlink()
    places = [str(folder), str(state)]
    ranks = [
        preloaded.start_quietly(SCRIPT, folder / f"{rank}.log", places[0], str(rank), str(world), places[1])
        for rank in range(world)
    ]
    try:
        if steps is None:
            assert [rank.wait(WITHIN_S) for rank in ranks] == [0] * world, (folder / "0.log").read_text()
            return
        give_up_s = time.monotonic() + WITHIN_S
        while any(len(each) < steps and b"end" not in each for each in states_of(folder, world)):
            assert time.monotonic() < give_up_s
            time.sleep(0.001)
    finally:
        for rank in ranks:
            rank.kill()
    reached = states_of(folder, world)
    common = min(len(each) - each.count(b"end") for each in reached)
    if common:
        assert len({each[common - 1] for each in reached}) == 1, "states of one step differ"
        state.write_bytes(reached[0][common - 1])


def killed(kills: int, folder: Path, preloaded: Preloaded) -> Audit:
    """The audit of a job with this number of kills, which then runs to its end."""
    draw, state = random.Random(kills), folder / "state.json"
    for _ in range(kills):
        attempt(folder, draw.randint(1, 4), draw.randint(0, 3), state, preloaded)
    attempt(folder, 2, None, state, preloaded)
    return audit(record for log in sorted(folder.glob("*.audit")) for record in read_audit_log(log))


def test_kills_and_world_changes_lose_and_repeat_nothing(preloaded: Preloaded, tmp_path: Path) -> None:
    found = killed(rounds(2, 20), tmp_path, preloaded)
    assert not found.faults
    assert list(found.proven.values()) == [SAMPLES] * 2


def main(kills: int) -> None:
    with Preloaded() as preloaded, tempfile.TemporaryDirectory() as folder:
        found = killed(kills, Path(folder), preloaded)
        print(f"{kills} kills: {len(found.faults)} faults; proven: {found.proven}")
        for fault in found.faults:
            print(fault)


if __name__ == "__main__":
    main(int(sys.argv[1]))
