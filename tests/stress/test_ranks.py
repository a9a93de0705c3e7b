"""Real ranks with gloo: distinct samples, equal steps, and a checkpoint that other world sizes can resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Preloaded

import feedline as fl

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).with_name("ranks_training.py")
N, BATCH, SEED = 103, 4, 9
WITHIN_S = 240


Ranks = Callable[..., dict[str, Any]]


TORCHRUN = """
import os
from torch.distributed.run import main

os.environ["OMP_NUM_THREADS"] = "1"
main()
"""


def torchrun(preloaded: Preloaded, out: Path, *arguments: str) -> dict[str, Any]:
    """Run `ranks_training.py` on two ranks under torchrun; returns the output of rank 0."""
    launcher, log = out.with_name("torchrun.py"), out.with_suffix(".log")
    launcher.write_text(TORCHRUN)
    launch = ("--standalone", "--nproc-per-node", "2", str(SCRIPT), str(out), *arguments)
    assert preloaded.run(launcher, log, WITHIN_S, *launch) == 0, log.read_text()
    return written(out)


@pytest.fixture(scope="module")
def ranks(preloaded: Preloaded) -> Ranks:
    """The same, without torchrun, on so many ranks that need not import torch first."""

    def run(world: int, out: Path, *arguments: str) -> dict[str, Any]:
        common = ["--world", str(world), "--meeting", str(out.with_suffix(".meeting")), *arguments]
        logs = [out.with_suffix(f".{rank}.log") for rank in range(world)]
        started = [
            preloaded.start_quietly(SCRIPT, log, str(out), "--rank", str(rank), *common)
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(WITHIN_S) for process in started]
        finally:
            for process in started:
                process.kill()
        assert not any(codes), [log.read_text() for log in logs]
        return written(out)

    return run


def written(out: Path) -> dict[str, Any]:
    steps: dict[str, Any] = json.loads(out.read_text())
    assert steps["states_agree"], "the state must not depend on the rank"
    return steps


def rows(steps: list[list[list[int]]]) -> list[int]:
    """The samples of all ranks, step by step, rank by rank: the global order."""
    return [index for step in steps for batch in step for index in batch]


def order(epoch: int = 0) -> list[int]:
    return fl.samplers.Shuffled(N, SEED).take(epoch, 0, N).tolist()


def assert_equal_steps(steps: list[list[list[int]]]) -> None:
    """Every rank gets a batch of the same size at every step."""
    assert all(len({len(batch) for batch in step}) == 1 for step in steps)


# torchrun and its ranks import torch three times.
@pytest.mark.parametrize("launched_by", ["us", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_two_ranks_with_worker_processes_share_every_epoch(
    launched_by: str, ranks: Ranks, preloaded: Preloaded, tmp_path: Path
) -> None:
    launch = partial(torchrun, preloaded) if launched_by == "torchrun" else partial(ranks, 2)
    run = launch(tmp_path / "run.json", "--epochs", "2", "--workers", "1")
    for epoch, steps in enumerate(run["epochs"]):
        assert_equal_steps(steps)
        seen = rows(steps)
        assert seen == order(epoch) + order(epoch)[: len(seen) - N]
        assert len(seen) - N < 2


def test_ranks_that_drop_the_last_batch_share_the_others(ranks: Ranks, tmp_path: Path) -> None:
    run = ranks(2, tmp_path / "run.json", "--epochs", "2", "--drop-last")
    for epoch, steps in enumerate(run["epochs"]):
        assert_equal_steps(steps)
        assert rows(steps) == order(epoch)[: N // (2 * BATCH) * (2 * BATCH)]


@pytest.fixture(scope="module")
def four_ranks(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run on four ranks that ended with a checkpoint after three steps, and the file of the checkpoint."""
    out = tmp_path_factory.mktemp("ranks") / "four.json"
    return out, ranks(4, out, "--stop", "3")


def test_four_ranks_share_the_samples(four_ranks: tuple[Path, dict[str, Any]]) -> None:
    (steps,) = four_ranks[1]["epochs"]
    assert_equal_steps(steps)
    assert rows(steps) == order()[: 3 * 4 * BATCH]


@pytest.mark.parametrize("world", [2, 3])
def test_a_checkpoint_of_four_ranks_continues_with_others(
    ranks: Ranks, four_ranks: tuple[Path, dict[str, Any]], world: int, tmp_path: Path
) -> None:
    checkpoint, before = four_ranks
    after = ranks(world, tmp_path / "resumed.json", "--resume", str(checkpoint), "--epochs", "2")
    assert_equal_steps(after["epochs"][0])
    seen = rows(before["epochs"][0]) + rows(after["epochs"][0])
    assert seen[:N] == order()
    assert len(seen) - N < world
    assert rows(after["epochs"][1])[:N] == order(1)


def test_a_distributed_sampler_keeps_torchs_order_and_advances(ranks: Ranks, tmp_path: Path) -> None:
    run = ranks(2, tmp_path / "run.json", "--epochs", "2", "--distributed-sampler")
    for epoch, steps in enumerate(run["epochs"]):
        permutation = torch.randperm(N, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        padded = permutation + permutation[: -N % 2]
        for rank in range(2):
            assert [index for step in steps for index in step[rank]] == padded[rank::2]
