"""Comparison of 8 gloo ranks at the start of an epoch: time, and names of the ranks that differ."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import feedline as fl
from feedline.loader.ranks.contract import Contract
from harness import Contest

WORLD, ROUNDS, FAULTS = 8, 15, 20


class Timed(Contract):
    """A contract that measures its time."""

    def check(self, *arguments: Any) -> None:
        began = perf_counter()
        try:
            super().check(*arguments)
        finally:
            self.seconds = perf_counter() - began


def loader(seed: int = 0) -> Any:
    made = fl.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(1_000)), batch_size=10, shuffle=True, seed=seed, distributed="auto"
    )
    made._fl_contract = Timed()
    return made


def rank_of_the_job(meeting: str, rank: int) -> None:
    """One rank: all are equal for some epochs, then one rank after the other differs."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{meeting}", rank=rank, world_size=WORLD)
    same, seconds, named = loader(), [], 0
    for _ in range(ROUNDS):
        dist.barrier()
        iter(same)
        seconds.append(same._fl_contract.seconds)
    odd = random.Random(0)
    for _ in range(FAULTS):
        wrong = odd.randrange(WORLD)
        try:
            iter(loader(seed=int(rank == wrong)))
        except fl.errors.RankError as error:
            named += f"seed is 1 on rank {wrong}, but 0 on the other ranks" in str(error)
    slowest: list[Any] = [None] * WORLD
    dist.all_gather_object(slowest, seconds)
    if rank == 0:
        print(json.dumps({"seconds": [max(each) for each in zip(*slowest, strict=True)], "named": named}))
    dist.destroy_process_group()


def main() -> None:
    port = 20_000 + hash(tempfile.gettempprefix()) % 10_000
    command = [sys.executable, str(Path(__file__)), str(port)]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(WORLD)]
    said = [rank.communicate()[0] for rank in ranks]
    measured = json.loads(said[0])
    seconds = iter(sorted(measured["seconds"]))
    race = Contest(f"contract of {WORLD} ranks", unit="s", baseline="limit")
    race.measure("limit", lambda: 0.1)
    race.measure("slowest rank, start of an epoch", lambda: next(seconds))
    race.run(rounds=ROUNDS - 1, warm_up=0).publish()
    print(f"odd ranks named: {measured['named']} of {FAULTS}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_of_the_job(sys.argv[1], int(sys.argv[2]))
    else:
        main()
