"""One rank of a gloo group that runs the cases of test_contract.py, and prints what happened."""

from __future__ import annotations

import gc
import json
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import feedline as fl
from feedline.loader.ranks.agreement import Agreement

RANK = int(sys.argv[3])


class Lanes(torch.utils.data.IterableDataset[int]):
    """Partitions of unequal length: 0.. in the first one, 10.. in the second, and so on."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.num_partitions = sizes, len(sizes)

    def __iter__(self) -> Iterator[int]:
        return self.partition(0, 0)

    def partition(self, partition: int, epoch: int) -> Iterator[int]:
        yield from range(10 * partition, 10 * partition + self.sizes[partition])


def share(n: int) -> Iterator[int]:
    """Numbers of this rank; no code of a dataset's class says so."""
    return iter(range(dist.get_rank(), n, dist.get_world_size()))


class Sharing(torch.utils.data.IterableDataset[int]):
    """Divides its numbers among the ranks by itself."""

    def __iter__(self) -> Iterator[int]:
        return share(30)


class Speaking(Sharing):
    """Yields all numbers on each rank; rank 0 would say so."""

    def __iter__(self) -> Iterator[int]:
        assert next(share(30)) == RANK
        return iter(range(30))


class Broken:
    """Six samples of each rank, of which those with an index in `bad` cannot be read."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(index)
        return index


def numbers(n: int) -> Any:
    return torch.utils.data.TensorDataset(torch.arange(n))


def shuffled(n: int = 30, batch_size: int = 5, seed: int = 0, ranks: Any = "auto") -> Any:
    return fl.DataLoader(numbers(n), batch_size=batch_size, shuffle=True, seed=seed, distributed=ranks)


def error_of(loader: Any) -> str:
    try:
        list(loader)
    except fl.errors.RankError as error:
        return str(error)
    return "no error"


def of_methods(stream: Any, ranks: Any) -> list[Any]:
    """The numbers, or the error, without workers and with those of each kind."""
    got: list[Any] = []
    for workers in ({}, {"worker_method": "thread"}, {"worker_method": "process"}):
        with fl.DataLoader(stream, 4, num_workers=len(workers), seed=0, distributed=ranks, **workers) as loader:
            try:
                got.append(torch.cat(list(loader)).tolist())
            except fl.errors.ArgumentError as error:
                got.append(str(error))
    return got


def lanes(uneven: Any) -> Any:
    return fl.DataLoader(Lanes([9, 7, 3]), batch_size=2, distributed=fl.RankPolicy(uneven=uneven))


def report() -> dict[str, Any]:
    """The results of this rank, case by case."""
    whole, advanced = shuffled(), shuffled()
    seen: dict[str, Any] = {"equal": [index for _ in range(2) for (batch,) in whole for index in batch.tolist()]}
    seen["met"] = whole._fl_monitor.figures()["met"]
    seen["seed"] = error_of(shuffled(seed=int(RANK == 1)))
    seen["length"] = error_of(shuffled(30 + (RANK == 2)))
    seen["batch size"] = error_of(shuffled(batch_size=5 + (RANK == 0)))
    if RANK == 2:
        advanced.load_state_dict({**advanced.state_dict(), "position": 15})
    seen["position"] = error_of(advanced)
    seen["share"] = error_of(shuffled(ranks=(RANK // 2, 3)))
    seen["stream"] = error_of(fl.DataLoader(Lanes([3, 3, 3]), distributed="auto") if RANK == 1 else shuffled())
    return seen


def report_uneven() -> dict[str, Any]:
    """The same for unequal numbers of batches; the loaders of all ranks are compared again."""
    seen: dict[str, Any] = {"raise": error_of(lanes("raise"))}
    stopping = lanes("stop")
    seen["stop"] = [batch.tolist() for batch in stopping]
    seen["stop epoch"] = stopping.state_dict()["epoch"]
    seen["repeat"] = [batch.tolist() for batch in lanes("repeat")]
    skipping = fl.DataLoader(
        Broken({17, 6, 7, 8}), batch_size=3, on_error="skip", distributed=fl.RankPolicy(uneven="stop")
    )
    seen["skip"] = [len(batch) for batch in skipping]
    seen["shares"] = of_methods(Sharing(), "auto")
    seen["speaks"] = of_methods(Speaking(), fl.RankPolicy(reads_all=True))
    own = fl.DataLoader(numbers(4 + RANK), distributed=fl.RankPolicy((0, 1), uneven="stop"))
    seen["own"] = len(list(own))
    n = 5000 + 500 * RANK  # more than a foreign sampler keeps
    own = fl.DataLoader(numbers(n), 500, sampler=range(n), distributed=fl.RankPolicy((0, 1), uneven="repeat"))
    seen["own repeat"] = [int(batch[0]) for (batch,) in own]
    if RANK != 2:  # the last case: from here on, rank 2 has one loader less
        seen["absent"] = error_of(shuffled(ranks=fl.RankPolicy(wait_s=0.2)))
    return seen


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*cannot share equally|.*has no partitions. each of")
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=RANK, world_size=int(sys.argv[2]))
    seen = {**report(), **report_uneven()}
    group = weakref.ref(Agreement("stop", lambda: iter(()))._group)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    print(json.dumps({**seen, "kept": group() is not None}))
