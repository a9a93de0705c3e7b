"""Large batches from four worker processes, each checked; run by test_shm.py where /dev/shm holds one megabyte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import feedline as fl

BATCH, SHAPE, BATCHES = 256, (3, 224, 224), 12


class Images(torch.utils.data.Dataset[Any]):
    """Uniform images: the value tells the index."""

    def __getitem__(self, index: int) -> Any:
        return torch.full(SHAPE, index % 251, dtype=torch.uint8), index

    def __len__(self) -> int:
        return BATCH * BATCHES


def main() -> None:
    room = os.statvfs("/dev/shm")
    assert room.f_blocks * room.f_frsize <= 1 << 20, "this test needs a /dev/shm of one megabyte"
    kept: list[torch.Tensor] = []
    with fl.DataLoader(Images(), batch_size=BATCH, num_workers=4, worker_method="process") as loader:
        for number, (images, index) in enumerate(loader):
            assert index.tolist() == list(range(BATCH * number, BATCH * (number + 1)))
            assert torch.equal(images[:, 0, 0, 0], (index % 251).to(torch.uint8))
            assert torch.equal(images.amin((1, 2, 3)), images.amax((1, 2, 3)))
            assert not any(Path("/dev/shm").iterdir())
            if number % 4 == 0:
                kept.append(images)
    for number, images in enumerate(kept):
        assert int(images[0, 0, 0, 0]) == 4 * number * BATCH % 251, "a batch that was kept has changed"
    print(f"{images.nbytes * BATCHES} bytes")


if __name__ == "__main__":
    main()
