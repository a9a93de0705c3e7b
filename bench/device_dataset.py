"""CIFAR-size data in memory: `DeviceDataset` compared with torch's DataLoader on a TensorDataset, on one device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch
from torch.utils.data import DataLoader, TensorDataset

import feedline as fl
from harness import Contest

SAMPLES, BATCH, BATCHES = 50_000, 512, 60


class Gathered(TensorDataset):
    """The gather that users write by hand: one indexing per batch."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        places = torch.tensor(indices).to(self.tensors[0].device)
        return tuple(tensor.index_select(0, places) for tensor in self.tensors)


def first(batches: Iterable[object]) -> Callable[[], None]:
    def run() -> None:
        for _, batch in zip(range(BATCHES), batches, strict=False):
            assert batch
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def main(device: str) -> None:
    images = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(10, (SAMPLES,))
    there = images.to(device), labels.to(device)
    arguments = {"batch_size": BATCH, "shuffle": True}
    torchs = DataLoader(TensorDataset(*there), **arguments)
    by_hand = DataLoader(Gathered(*there), collate_fn=lambda batch: batch, **arguments)
    feedlines = fl.DataLoader(fl.datasets.DeviceDataset((images, labels), device=device), seed=0, **arguments)
    tensors = fl.DataLoader(TensorDataset(*there), seed=0, **arguments)
    copied = fl.DataLoader(TensorDataset(images, labels), seed=0, num_workers=2, device=device, **arguments)
    contest = Contest("device dataset on " + device, unit="batches/s", baseline="torch, TensorDataset")
    contest.add("torch, TensorDataset", first(torchs), BATCHES)
    contest.add("torch, __getitems__ by hand", first(by_hand), BATCHES)
    if device != "cpu":
        contest.add("feedline, from host memory", first(copied), BATCHES)
    contest.add("feedline, TensorDataset", first(tensors), BATCHES)
    contest.add("feedline, DeviceDataset", first(feedlines), BATCHES)
    contest.run().publish()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
