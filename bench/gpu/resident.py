"""Claim: `DeviceDataset` gives batches of CIFAR's size ten times as fast as the best loader that copies from the CPU.

50,000 images of 32×32 pixels in batches of 512 on the device, shuffled. The peers are feedline from host memory,
torch's DataLoader with workers and the prefetcher of tutorials, a gather by hand, and DALI and FFCV where they are
installed. With "cpu" as its argument the script runs without a GPU, to check itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from peers import Batches, Contest, dali_memory, ffcv, optional, prefetched, publish
from torch.utils.data import DataLoader, TensorDataset

import feedline as fl

ON_CUDA = sys.argv[1:2] != ["cpu"]
DEVICE = "cuda" if ON_CUDA else "cpu"
SAMPLES, BATCH, SECONDS, ROUNDS = (50_000, 512, 0.4, 5) if ON_CUDA else (512, 64, 0.01, 1)
WORKERS = min(8, len(os.sched_getaffinity(0))) if ON_CUDA else 1


class Gathered(TensorDataset):
    """The gather that users write by hand: one indexing per batch."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        places = torch.tensor(indices)
        return tuple(tensor.index_select(0, places) for tensor in self.tensors)


def rate(name: str, batches: Batches) -> float:
    """Batches per second of whole epochs, complete on the device, for at least `SECONDS`."""
    started, count = perf_counter(), 0
    while (seconds := perf_counter() - started) < SECONDS:
        for images, _ in islice(batches(), SAMPLES // BATCH):  # DALI's epochs have no end
            assert images.device.type == DEVICE
            count += 1
        if ON_CUDA:
            torch.cuda.synchronize()
    print(f"{name}: {count} batches in {seconds:.3f} s, {count / seconds:.0f} batches/s", flush=True)
    return count / seconds


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
    makes: dict[str, Batches] = loaders(images, labels)
    with TemporaryDirectory() as folder:
        rows = [(image.permute(1, 2, 0).numpy(), int(label)) for image, label in zip(images, labels, strict=True)]
        arrays, file = (images.numpy(), labels.numpy()), Path(folder) / "cifar.beton"
        peers = {
            "DALI": lambda: dali_memory(*arrays, BATCH, WORKERS, DEVICE),
            "FFCV": lambda: ffcv(rows, file, BATCH, WORKERS, DEVICE),
        }
        for name, make in peers.items():
            batches = optional(name, make)
            if batches is not None and optional(name, partial(rate, name, batches)) is not None:
                makes[name] = batches
        for name, batches in makes.items():
            contest.measure(name, partial(rate, name, batches))
        publish(contest.run(ROUNDS, warm_up=int(ON_CUDA)), on_cuda=ON_CUDA)


if __name__ == "__main__":
    main()
