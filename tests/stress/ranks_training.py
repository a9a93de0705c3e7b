"""One rank; rank 0 writes the samples of every rank and step; run by test_ranks.py.

The number of the rank is in the environment of torchrun, or else in the arguments.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

import feedline as fl


class Indices:
    """Samples that are their own indices, for worker processes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.n


def gathered(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def loader_of(args: argparse.Namespace) -> Any:
    dataset: Any = Indices(args.n)
    common = {"batch_size": args.batch_size, "num_workers": args.workers, "drop_last": args.drop_last}
    if args.distributed_sampler:
        sampler: Any = DistributedSampler(dataset, shuffle=True, seed=9, drop_last=args.drop_last)
        return fl.DataLoader(dataset, sampler=sampler, **common)
    return fl.DataLoader(dataset, shuffle=True, seed=9, distributed="auto", **common)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--n", type=int, default=103)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--stop", type=int, help="checkpoint after so many steps, and end")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--distributed-sampler", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--meeting", help="a file through which the ranks find each other")
    args = parser.parse_args()
    if args.rank is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", f"file://{args.meeting}", rank=args.rank, world_size=args.world)
    with loader_of(args) as loader:
        if args.resume:
            loader.load_state_dict(json.loads(args.resume.read_text())["state"])
        epochs, states = train(loader, args)
    if dist.get_rank() == 0:
        agreed = len(set(states)) == 1
        args.out.write_text(json.dumps({"epochs": epochs, "state": json.loads(states[0]), "states_agree": agreed}))
    dist.destroy_process_group()


def train(loader: Any, args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """The samples of the ranks, by epoch and step, and the state of each at the end."""
    epochs: list[Any] = []
    steps = 0
    for _ in range(args.epochs):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(gathered(batch.tolist()))
            steps += 1
            if steps == args.stop:
                return epochs, gathered(json.dumps(loader.state_dict()))
    return epochs, gathered(json.dumps(loader.state_dict()))


if __name__ == "__main__":
    main()
