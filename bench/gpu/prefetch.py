"""Claim: `device="cuda"` copies at the rate of page-locked memory and keeps the GPU as busy as resident batches.

Batches of 256 images (3×224×224, uint8, 38.5 MB) from worker processes feed a ResNet-50 in bfloat16. The peers are
torch's DataLoader with its pin thread and `non_blocking` copies, the same with the prefetcher that tutorials show, DALI
and FFCV where they are installed, and one batch that is already on the device. With "cpu" as its argument the script
runs without a GPU, to check itself: a small model, and no figures of copies. "GPU busy" is the time between events
around the steps, divided by the wall time of the same runs; "copy hidden" is the part of the copying that the loop did
not wait for.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from peers import Batches, Contest, dali_memory, ffcv, optional, prefetched, publish
from torch import Tensor, nn

import feedline as fl

ON_CUDA = sys.argv[1:2] != ["cpu"]
DEVICE = "cuda" if ON_CUDA else "cpu"
BATCH_SIZE, IMAGE_COUNT, SIDE = (256, 4096, 224) if ON_CUDA else (4, 32, 32)
NUM_WORKERS = min(8, len(os.sched_getaffinity(0))) if ON_CUDA else 1
WARM_UP, STEPS, ROUNDS, WARM_ROUNDS = (10, 60, 5, 1) if ON_CUDA else (1, 4, 1, 0)
THERE, OURS, THEIRS, LIMIT = "batch on the device", "feedline", "torch, pin thread", "page-locked memory alone"
TUTORIAL = "torch, pin thread and prefetcher"

Batch = tuple[Tensor, Tensor]


class RandomImages(torch.utils.data.Dataset):
    """Decoded images in memory: loading is cheap, so that the copy to the device is measured."""

    def __init__(self) -> None:
        self.images = torch.randint(0, 256, (IMAGE_COUNT, 3, SIDE, SIDE), dtype=torch.uint8)

    def __len__(self) -> int:
        return IMAGE_COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 1000


class Bottleneck(nn.Module):
    """He et al., "Deep residual learning for image recognition" (2015), with the stride on the 3×3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1), nn.ReLU(),
            *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, 4 * width, 1),
        )  # fmt: skip
        fits = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if fits else nn.Sequential(*_convolution(inputs, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet50() -> nn.Module:
    """The layers of ResNet-50: 25.6 million parameters."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Training:
    """A usual step: normalize on the device, forward, backward, SGD."""

    def __init__(self) -> None:
        model = resnet50() if ON_CUDA else nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 1000))
        self.model = model.to(DEVICE).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        inputs = images.to(memory_format=torch.channels_last).float().div(255).sub(0.45).div(0.225)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()
        self.optimizer.step()


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one loader."""

    images_per_s: float
    busy_share: float
    copied_gb_per_s: float = 0.0
    hidden_share: float = 0.0


def measure(training: Training, batches: Iterator[Batch]) -> Run:
    """Train on the batches of a loader; the first steps are not counted."""
    for images, labels in islice(batches, WARM_UP):
        training.step(images, labels)
    wait()
    started, steps = perf_counter(), list[tuple[Any, Any]]()
    for images, labels in islice(batches, STEPS):
        begun = mark()
        training.step(images, labels)
        steps.append((begun, mark()))
    wait()
    wall_s = perf_counter() - started
    busy_s = sum(begun.elapsed_time(ended) for begun, ended in steps) / 1e3
    return Run(len(steps) * BATCH_SIZE / wall_s, busy_s / wall_s)


def wait() -> None:
    """Wait for the device."""
    if ON_CUDA:
        torch.cuda.synchronize()


class Moment:
    """An event of the CPU, whose work is done when its call returns."""

    def __init__(self) -> None:
        self.at = perf_counter()

    def elapsed_time(self, later: Moment) -> float:
        return (later.at - self.at) * 1e3


def mark() -> Any:
    """Record the time at which the device reaches this point."""
    if not ON_CUDA:
        return Moment()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def there(training: Training) -> Run:
    """The limit: the batch is already on the device."""
    images = torch.randint(0, 256, (BATCH_SIZE, 3, SIDE, SIDE), dtype=torch.uint8).to(DEVICE)
    return measure(training, iter([(images, torch.arange(BATCH_SIZE).to(DEVICE))] * (WARM_UP + STEPS)))


def ours(data: RandomImages, training: Training) -> Run:
    """feedline, batches on the device."""
    with fl.DataLoader(
        data, BATCH_SIZE, shuffle=True, drop_last=True, seed=0, num_workers=NUM_WORKERS, worker_method="process",
        persistent_workers=True, device=DEVICE,
    ) as loader:  # fmt: skip
        run = measure(training, epochs(loader))
        stats = loader.stats()
    if not stats.copy_s:
        return run
    return Run(
        run.images_per_s, run.busy_share, stats.copied_nbytes / stats.copy_s / 1e9, stats.hidden_copy_s / stats.copy_s
    )


def theirs(data: RandomImages, training: Training) -> Run:
    """torch, with its pin thread; the loop copies."""
    moved = (to_device(batch) for batch in epochs(pinning(data)))
    with closing(moved):
        return measure(training, moved)


def tutorial(data: RandomImages, training: Training) -> Run:
    """torch, with its pin thread and a prefetcher on a stream of its own."""
    with closing(prefetched(epochs(pinning(data)))) as moved:
        return measure(training, moved)


def peer(batches: Batches, training: Training) -> Run:
    """A loader of another library, epoch after epoch."""
    steps = ((images, labels.flatten()) for _ in iter(int, 1) for images, labels in batches())
    with closing(steps):
        return measure(training, steps)


def pinning(data: RandomImages) -> torch.utils.data.DataLoader[Batch]:
    return torch.utils.data.DataLoader(
        data, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=NUM_WORKERS, persistent_workers=True,
        pin_memory=ON_CUDA,
    )  # fmt: skip


def to_device(batch: Batch) -> Batch:
    images, labels = batch
    return images.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)


def epochs(loader: torch.utils.data.DataLoader[Batch]) -> Iterator[Any]:
    """One epoch after the other, without end."""
    while True:
        yield from loader


def alone() -> float:
    """GB/s of one large copy from page-locked memory, with nothing else on the bus."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    rates = []
    for _ in range(5):
        begun = mark()
        device.copy_(host, non_blocking=True)
        ended = mark()
        torch.cuda.synchronize()
        rates.append(host.nbytes / begun.elapsed_time(ended) / 1e6)
    return statistics.median(rates)


def compare(runners: dict[str, Callable[[], Run]]) -> None:
    """Three tables of the same runs: images per second, GPU busy, and rate of copies."""
    runs: dict[str, list[Run]] = {name: [] for name in runners}

    def recorded(name: str) -> float:
        runs[name].append(runners[name]())
        return runs[name][-1].images_per_s

    speed = Contest("gpu_prefetch", unit="images/s", baseline=THEIRS)
    for name in runners:
        speed.measure(name, lambda name=name: recorded(name))
    publish(speed.run(ROUNDS, WARM_ROUNDS), on_cuda=ON_CUDA)

    busy = Contest("gpu_busy", unit="share", baseline=THEIRS)
    for name in runners:
        busy.measure(name, iter([run.busy_share for run in runs[name][WARM_ROUNDS:]]).__next__)
    publish(busy.run(ROUNDS, warm_up=0), on_cuda=ON_CUDA)
    if not ON_CUDA:
        return

    copies = Contest("gpu_copies", unit="GB/s", baseline=LIMIT)
    copies.measure(LIMIT, alone)
    copies.measure(OURS, iter([run.copied_gb_per_s for run in runs[OURS][WARM_ROUNDS:]]).__next__)
    publish(copies.run(ROUNDS, warm_up=0), on_cuda=True)

    hidden = Contest("gpu_copy_hidden", unit="share", baseline=OURS)
    hidden.measure(OURS, iter([run.hidden_share for run in runs[OURS][WARM_ROUNDS:]]).__next__)
    publish(hidden.run(ROUNDS, warm_up=0), on_cuda=True)


def main() -> None:
    if ON_CUDA and not torch.cuda.is_available():
        print("bench/gpu/prefetch.py: no CUDA device, nothing to measure")
        return
    data, training = RandomImages(), Training()
    runners = {
        THERE: lambda: there(training),
        THEIRS: lambda: theirs(data, training),
        TUTORIAL: lambda: tutorial(data, training),
        OURS: lambda: ours(data, training),
    }
    with TemporaryDirectory() as folder:
        images, labels = data.images.numpy(), torch.arange(IMAGE_COUNT).remainder(1000).numpy()
        rows = [(image.transpose(1, 2, 0), int(label)) for image, label in zip(images, labels, strict=True)]
        file = Path(folder) / "images.beton"
        others = {
            "DALI": lambda: dali_memory(images, labels, BATCH_SIZE, NUM_WORKERS, DEVICE),
            "FFCV": lambda: ffcv(rows, file, BATCH_SIZE, NUM_WORKERS, DEVICE),
        }
        for name, make in others.items():
            batches = optional(name, make)
            if batches is not None:
                runners[name] = lambda batches=batches: peer(batches, training)
        compare(runners)


if __name__ == "__main__":
    main()
