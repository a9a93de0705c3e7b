"""Claim: `DecodeOnDevice` feeds a GPU faster than all CPUs of the machine decode.

JPEGs of 500×375 pixels through the training pipeline of ImageNet, into batches on the device. The peers are feedline's
workers, which decode on all CPUs, and, where they are installed, torchvision in torch's DataLoader with the prefetcher
of tutorials, DALI with mixed decoding, and FFCV. With "cpu" as its argument the script runs without a GPU, to check
itself.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from peers import Batches, Contest, add_optional, dali_jpegs, ffcv, prefetched, publish
from PIL import Image

import feedline as fl
from feedline import transforms

ON_CUDA = sys.argv[1:2] != ["cpu"]
IMAGES, BATCH, SIZE, ROUNDS = (4096, 256, 224, 5) if ON_CUDA else (16, 8, 64, 1)
WORKERS = len(os.sched_getaffinity(0)) if ON_CUDA else 1


def write(folder: Path, count: int) -> None:
    """Soft shapes with grain, which compress to the size of photographs."""
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        grain = rng.integers(-12, 13, (375, 500, 3))
        photo = (np.asarray(coarse).astype(int) + grain).clip(0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(photo).save(file, "JPEG", quality=85)
        place = folder / f"class{number % 8}" / f"{number:05d}.jpg"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(file.getvalue())


def loader(folder: Path, transform: Any, device: str) -> fl.DataLoader[Any]:
    data = fl.datasets.ImageFolder(folder, transform)
    return fl.DataLoader(data, BATCH, shuffle=True, seed=0, drop_last=True, num_workers=WORKERS, device=device)


def epoch(batches: Callable[[], Iterator[Any]], device: str) -> Callable[[], None]:
    def run() -> None:
        for images, _ in batches():
            assert images.device.type == device
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def torchvision(folder: Path, device: str) -> Batches:
    """torch's DataLoader with its pin thread, torchvision's ImageFolder and v2, and the prefetcher of tutorials."""
    from torchvision import datasets
    from torchvision.transforms import v2

    scale = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    normalize = v2.Normalize(transforms.IMAGENET_MEAN, transforms.IMAGENET_STD)
    steps = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), *scale, normalize])
    loader = torch.utils.data.DataLoader(
        datasets.ImageFolder(str(folder), steps), BATCH, shuffle=True, drop_last=True, num_workers=WORKERS,
        persistent_workers=True, pin_memory=device == "cuda",
    )  # fmt: skip
    return lambda: prefetched(iter(loader))


def main(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        print("bench/gpu/decode.py: no CUDA device, nothing to measure")
        return
    count = IMAGES if device == "cuda" else 2 * BATCH
    train = transforms.imagenet_train(SIZE)
    with TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, count)
        workers = loader(folder, train, device)
        there = loader(folder, transforms.DecodeOnDevice(train), device)
        contest = Contest(f"decode on {device}", unit="images/s", baseline="feedline, workers")
        contest.add("feedline, workers", epoch(lambda: iter(workers), device), count)
        contest.add("feedline, on the device", epoch(lambda: iter(there), device), count)
        files = [path.read_bytes() for path in sorted(folder.rglob("*.jpg"))[:BATCH]]
        split = transforms.DecodeOnDevice.measured(train, files, device, WORKERS)
        both = loader(folder, split, device)
        contest.add(f"feedline, {split.cpu_share:.0%} by workers", epoch(lambda: iter(both), device), count)
        timed = lambda batches: epoch(batches, device)  # noqa: E731
        add_optional(contest, "torch and torchvision", lambda: torchvision(folder, device), timed, count)
        add_optional(contest, "DALI", lambda: dali_jpegs(folder, BATCH, SIZE, WORKERS, device), timed, count)
        images = [(Image.open(path).convert("RGB"), 0) for path in sorted(folder.rglob("*.jpg"))]
        file = folder.with_suffix(".beton")
        add_optional(contest, "FFCV", lambda: ffcv(images, file, BATCH, WORKERS, device, SIZE), timed, count)
        publish(contest.run(ROUNDS, warm_up=int(ON_CUDA)), on_cuda=device == "cuda")
        stats = there.stats()
        print(f"decoded on the device: {stats.decoded_on_device}, of them by the CPU: {stats.decode_fallbacks}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
