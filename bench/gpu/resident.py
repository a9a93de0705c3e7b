"""Claim: `DeviceDataset` gives batches of CIFAR's size ten times as fast as the best loader that copies from the CPU.

50,000 images of 32×32 pixels in batches of 512 on the device, shuffled. The peers are feedline from host memory,
torch's DataLoader with workers and the prefetcher of tutorials, a gather by hand, and DALI and FFCV where they are
installed. With "cpu" as its argument the script runs without a GPU, to check itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peers import Batches, Contest, add_optional, dali_memory, ffcv, prefetched, publish
from torch.utils.data import DataLoader, TensorDataset

import feedline as fl

ON_CUDA = sys.argv[1:2] != ["cpu"]
DEVICE = "cuda" if ON_CUDA else "cpu"
SAMPLES, BATCH, BATCHES, ROUNDS = (50_000, 512, 60, 5) if ON_CUDA else (512, 64, 4, 1)
WORKERS = min(8, len(os.sched_getaffinity(0))) if ON_CUDA else 1


class Gathered(TensorDataset):
    """The gather that users write by hand: one indexing per batch."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        places = torch.tensor(indices)
        return tuple(tensor.index_select(0, places) for tensor in self.tensors)


def first(batches: Batches) -> Callable[[], None]:
    """The first batches of an epoch, complete on the device."""

    def run() -> None:
        for images, _ in islice(batches(), BATCHES):
            assert images.device.type == DEVICE
        if ON_CUDA:
            torch.cuda.synchronize()

    return run


def loaders(images: torch.Tensor, labels: torch.Tensor) -> dict[str, Batches]:
    """feedline's loaders and torch's, the baseline first."""
    host, there = TensorDataset(images, labels), TensorDataset(images.to(DEVICE), labels.to(DEVICE))
    resident = fl.datasets.DeviceDataset((images, labels), device=DEVICE)
    shuffled: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "drop_last": True}
    torchs = {**shuffled, "num_workers": WORKERS, "persistent_workers": True, "pin_memory": ON_CUDA}
    by_hand = DataLoader(Gathered(*host.tensors), collate_fn=tuple, pin_memory=ON_CUDA, **shuffled)
    copied = fl.DataLoader(host, seed=0, num_workers=WORKERS, persistent_workers=True, device=DEVICE, **shuffled)

    def ahead(loader: Any) -> Iterator[Any]:
        return prefetched(iter(loader))

    return {
        "feedline, from host memory": lambda: iter(copied),
        "feedline, from host memory without workers": partial(
            iter, fl.DataLoader(host, seed=0, device=DEVICE, **shuffled)
        ),
        "torch, workers and prefetcher": partial(ahead, DataLoader(host, **torchs)),
        "torch, gather by hand and prefetcher": partial(ahead, by_hand),
        "torch, tensors on the device": partial(iter, DataLoader(there, **shuffled)),
        "feedline, DeviceDataset": partial(iter, fl.DataLoader(resident, seed=0, **shuffled)),
    }


def main() -> None:
    if ON_CUDA and not torch.cuda.is_available():
        print("bench/gpu/resident.py: no CUDA device, nothing to measure")
        return
    images = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(10, (SAMPLES,))
    contest = Contest(f"resident on {DEVICE}", unit="batches/s", baseline="feedline, from host memory")
    for name, batches in loaders(images, labels).items():
        contest.add(name, first(batches), BATCHES)
    with TemporaryDirectory() as folder:
        rows = [(image.permute(1, 2, 0).numpy(), int(label)) for image, label in zip(images, labels, strict=True)]
        arrays, file = (images.numpy(), labels.numpy()), Path(folder) / "cifar.beton"
        add_optional(contest, "DALI", lambda: dali_memory(*arrays, BATCH, WORKERS, DEVICE), first, BATCHES)
        add_optional(contest, "FFCV", lambda: ffcv(rows, file, BATCH, WORKERS, DEVICE), first, BATCHES)
        publish(contest.run(ROUNDS, warm_up=int(ON_CUDA)), on_cuda=ON_CUDA)


if __name__ == "__main__":
    main()
