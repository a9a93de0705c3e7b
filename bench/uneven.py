"""Cost of the ranks' agreement on each step of a stream: CPU time and time of a step, for each rule of `uneven=`.

Four gloo ranks read streams of equal length, whose batches cost nothing, so that only the agreement takes time. A step
of `DistributedDataParallel` makes at least one such collective call itself, which is the baseline.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist

import feedline as fl
from harness import Contest

WORLD, STEPS, ROUNDS = 4, 400, 7

RULES = "allow", "raise", "stop", "repeat"

REDUCE = "one all_reduce of 4 numbers"


class Equal(torch.utils.data.IterableDataset[Any]):
    """As many partitions as ranks, of equal length."""

    num_partitions = WORLD

    def __iter__(self) -> Iterator[Any]:
        return iter(range(STEPS))

    def partition(self, _: int, __: int) -> Iterator[Any]:
        return iter(self)


def steps(rule: str) -> None:
    """Steps of one rank: an epoch of a loader, or bare collective calls."""
    if rule == REDUCE:
        for _ in range(STEPS):
            dist.all_reduce(torch.zeros(WORLD, dtype=torch.int32))
        return
    ranks = fl.RankPolicy("auto", uneven=rule, check=False)
    assert sum(1 for _ in fl.DataLoader(Equal(), 1, distributed=ranks)) == STEPS


def rank_of_the_job(port: str, rank: int) -> None:
    """One rank; the first prints times of a step in µs, by rule and round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    found: dict[str, list[tuple[float, float]]] = {rule: [] for rule in (REDUCE, *RULES)}
    for _ in range(ROUNDS + 1):
        for rule, times in found.items():
            dist.barrier()
            wall, cpu = perf_counter(), process_time()
            steps(rule)
            times.append(((process_time() - cpu) / STEPS * 1e6, (perf_counter() - wall) / STEPS * 1e6))
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, str(Path(__file__)), port]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(WORLD)]
    said = [rank.communicate()[0] for rank in ranks]
    found = json.loads(said[0])
    for column, name in enumerate(("CPU time", "time")):
        contest = Contest(f"step of four ranks with uneven=, {name}", unit="µs", baseline=REDUCE)
        for rule, times in found.items():
            label, runs = rule if rule == REDUCE else f'uneven="{rule}"', iter([each[column] for each in times])
            contest.measure(label, partial(next, runs))
        contest.run(rounds=ROUNDS).publish()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_of_the_job(sys.argv[1], int(sys.argv[2]))
    else:
        main()
