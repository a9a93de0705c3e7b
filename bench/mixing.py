"""Mixture and packing, compared with the same work unmixed and unpacked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import feedline as fl
from harness import Contest
from loaders import rate

DOCUMENTS, LONGEST, TOKENS, BATCH = 6_000, 400, 2_048, 8


def documents(count: int, seed: int) -> list[torch.Tensor]:
    lengths = np.random.default_rng(seed).integers(20, LONGEST, count)
    return [torch.full((int(length),), seed) for length in lengths]


def packed(stream: Any) -> Any:
    return fl.DataLoader(stream.shuffle(256).pack(TOKENS, buffer=256), BATCH, seed=0)


def streams() -> None:
    """Rows of packed tokens from one stream of all documents, and from a mixture of three with the same documents."""
    parts = [documents(DOCUMENTS * share // 10, seed) for seed, share in enumerate((6, 3, 1), 1)]
    whole = fl.streams.from_dataset([document for part in parts for document in part], fl.samplers.Shuffled(DOCUMENTS))
    sources = [fl.streams.from_dataset(part, fl.samplers.Shuffled(len(part))) for part in parts]
    mixed = fl.streams.mix(sources, [6, 3, 1], stop="each_once")
    race = Contest("mixture and packing of streams", unit="batches/s", baseline="one stream, packed")
    race.measure("one stream, packed", rate(lambda: packed(whole), most_s=1.0))
    race.measure("three streams mixed, packed", rate(lambda: packed(mixed), most_s=1.0))
    race.run(rounds=5).publish()
    loader = packed(mixed)
    rows = sum(len(batch["segments"]) for batch in loader)
    padding = 1 - sum(map(len, (d for part in parts for d in part))) / (rows * TOKENS)
    print(f"padding: {padding:.2%} of the tokens; {loader.stats().padding_share or 0:.2%} in the statistics")


def samplers() -> None:
    """Batches of a concatenated dataset in one shuffled order, and in the order of a mixture."""
    sizes = [600_000, 300_000, 100_000]
    data = fl.datasets.Arrays(np.arange(sum(sizes) * 16, dtype=np.float32).reshape(-1, 16))
    orders = {
        "shuffled": fl.samplers.Shuffled(sum(sizes)),
        "mixture": fl.samplers.Mixture(sizes, [6, 3, 1]),
        "curriculum": fl.samplers.Curriculum(sizes, [(500_000, [8, 1, 1]), (500_000, [4, 4, 2])]),
    }
    race = Contest("mixture of map-style datasets", unit="batches/s", baseline="shuffled")
    for name, order in orders.items():
        race.measure(name, rate(lambda order=order: fl.DataLoader(data, 256, sampler=order, seed=0), most_s=0.7))
    race.run(rounds=5).publish()


if __name__ == "__main__":
    streams()
    samplers()
