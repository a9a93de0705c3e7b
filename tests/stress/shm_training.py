"""Large batches from four worker processes, each checked, with one megabyte of /dev/shm; run by test_shm.py as root."""

from __future__ import annotations

import ctypes
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch

import feedline as fl

BATCH, SHAPE, BATCHES = 64, (3, 224, 224), 12

CLONE_NEWNS = 0x20000
"""Of `linux/sched.h`: a mount namespace of its own."""


def mount_small_shm() -> None:
    """Give this process, and those that it forks, a /dev/shm of one megabyte."""
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)


class Images(torch.utils.data.Dataset[Any]):
    """Uniform images: the value tells the index."""

    def __getitem__(self, index: int) -> Any:
        return torch.full(SHAPE, index % 251, dtype=torch.uint8), index

    def __len__(self) -> int:
        return BATCH * BATCHES


def main() -> None:
    mount_small_shm()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # on a machine with few CPUs
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
